"""The `ulp` encoding: which units changed, class by class, and by how many steps.

Part of the executable specification (docs/FORMAT.md, "ulp").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter
from weightwire.codec.block_frame import LINES, ULP, entropy_coded, read_entropy_coded
from weightwire.codec.exponent_classes import (
    CLASSES,
    Bounds,
    Units,
    classes_of,
    order,
    read_classes,
    unorder,
    write_classes,
)
from weightwire.codec.frequency_tables import Shares
from weightwire.codec.marks import Marks, MarksHead, lines_pay, marked, read_marks, write_marks
from weightwire.codec.rans import Decoder, Section
from weightwire.codec.step_tables import (
    Steps,
    StepTable,
    magnitudes_of,
    read_step_tables,
    share_tables,
    steps_between,
    write_step_tables,
)
from weightwire.weights import Dtype

__all__ = ["Positions", "decode_ulp", "encode_ulp"]

_FIRST_J = 20

Positions = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class _UlpPlan:
    """The changes of a block before they are written: marks and steps of every class that has changes."""

    bounds: Bounds
    present: list[int]
    lines: Marks | None
    marks: list[Marks]
    steps: list[Steps]
    tables: list[StepTable]

    @staticmethod
    def of(old: Units, new: Units, dtype: Dtype, line: int, bounds: Bounds) -> _UlpPlan:
        classes = classes_of(old, dtype, bounds)
        changed = old != new
        lines: Marks | None = None
        if line:
            active = changed.reshape(-1, line).any(axis=1)
            within = np.repeat(active, line)
            counts = [np.bincount(which, minlength=CLASSES) for which in (classes, classes[within], classes[changed])]
            if lines_pay(active, *(one.tolist() for one in counts)):
                lines = Marks.of(np.flatnonzero(active), len(active))
                old, new, classes, changed = old[within], new[within], classes[within], changed[within]
        present, marks, steps = [], [], []
        for c in range(CLASSES):
            member = classes == c
            here = member & changed
            if here.any():
                present.append(c)
                marks.append(Marks.of(np.flatnonzero(changed[member]), int(member.sum())))
                steps.append(Steps.of(steps_between(old[here], new[here], dtype), dtype))
        tables = share_tables([StepTable.of(one.symbols) for one in steps])
        return _UlpPlan(bounds, present, lines, marks, steps, tables)

    @property
    def all_marks(self) -> list[Marks]:
        return [*([self.lines] if self.lines else []), *self.marks]

    def sections(self) -> list[Section]:
        steps = [Section.of(s.symbols, t.shares()) for s, t in zip(self.steps, self.tables, strict=True)]
        return [marks.section() for marks in self.all_marks] + steps

    def write_heads(self, bits: BitWriter, dtype: Dtype) -> None:
        write_classes(bits, self.bounds, self.present, dtype)
        if self.lines:
            write_marks(bits, self.lines, 0)
        expected = _FIRST_J
        for m, s in zip(self.marks, self.steps, strict=True):
            write_marks(bits, m, expected)
            if m.complement:
                bits.golomb(len(s.symbols) - 1, 8)
            expected = _next_j(m.j if len(m.symbols) else expected)
        write_step_tables(bits, self.tables)

    def write_raw(self, bits: BitWriter) -> None:
        for marks in self.all_marks:
            marks.write_raw(bits)
        for s in self.steps:
            bits.numbers(s.low, s.widths)


def encode_ulp(old: Units, new: Units, dtype: Dtype, line: int, bounds: Bounds) -> bytes:
    plan = _UlpPlan.of(old, new, dtype, line, bounds)
    bits = BitWriter()
    plan.write_heads(bits, dtype)
    plan.write_raw(bits)
    return entropy_coded(ULP | (LINES if plan.lines else 0), plan.sections()) + bits.to_bytes()


def _next_j(j: int) -> int:
    """The expected parameter of the next class, which has half the ulp and twice the rate."""
    return max(0, j - 4)


@dataclass(frozen=True)
class _ClassHead:
    """The header of one class."""

    number: int
    marks: MarksHead
    steps: int  # only for complements
    table: Shares


@dataclass(frozen=True)
class _Heads:
    bounds: Bounds
    lines: MarksHead | None
    classes: list[_ClassHead]


def decode_ulp(data: memoryview, old: Units, dtype: Dtype, line: int) -> tuple[Positions, Units]:
    decoder, rest = read_entropy_coded(data)
    bits = BitReader(rest)
    heads = _read_heads(bits, len(old), dtype, line, has_lines=bool(data[0] & LINES))
    where = np.arange(len(old))
    if heads.lines:
        listed = heads.lines.ranks(decoder, bits, len(old) // line)
        where = where.reshape(-1, line)[marked(listed, len(old) // line, heads.lines.complement)].ravel()
    ranks = [head.marks.ranks(decoder, bits, len(old)) for head in heads.classes]
    positions = []
    values = []
    classes = classes_of(old[where], dtype, heads.bounds)
    for head, listed in zip(heads.classes, ranks, strict=True):
        members = where[classes == head.number]
        here = members[marked(listed, len(members), head.marks.complement)]
        if head.marks.complement and len(here) != head.steps:
            raise ValueError("the number of steps differs from the number of changes")
        positions.append(here)
        steps = _read_steps(decoder, bits, len(here), head.table, dtype)
        values.append(unorder(order(old[here], dtype) + steps.astype(old.dtype), dtype))
    decoder.finish()
    bits.finish()
    at = np.concatenate(positions)
    sort = np.argsort(at)
    return at[sort].astype(np.uint32), np.concatenate(values)[sort]


def _read_heads(bits: BitReader, count: int, dtype: Dtype, line: int, *, has_lines: bool) -> _Heads:
    bounds, present = read_classes(bits, dtype)
    if has_lines and not line:
        raise ValueError("it lists lines where there are none")
    lines = read_marks(bits, count // line, 0) if has_lines else None
    marks: list[MarksHead] = []
    steps: list[int] = []
    expected = _FIRST_J
    for _ in present:
        marks.append(read_marks(bits, count - sum(one.symbols for one in marks), expected))
        steps.append(bits.golomb(8) + 1 if marks[-1].complement else 0)
        if not marks[-1].complement and not marks[-1].symbols:
            raise ValueError("it lists a class without a change")
        if sum(steps) > count:
            raise ValueError("it has more steps than weights")
        expected = _next_j(marks[-1].j)
    tables = read_step_tables(bits, len(present), dtype)
    return _Heads(bounds, lines, [_ClassHead(*one) for one in zip(present, marks, steps, tables, strict=True)])


def _read_steps(decoder: Decoder, bits: BitReader, count: int, table: Shares, dtype: Dtype) -> npt.NDArray[np.uint64]:
    symbols = decoder.section(count, table).astype(np.int64)
    least, widths = magnitudes_of(symbols >> 1, dtype)
    magnitudes = least + bits.numbers(widths)
    return np.where(symbols & 1, -magnitudes, magnitudes)
