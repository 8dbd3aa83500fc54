"""The `dense` encoding: a step or none for every unit, in the order of positions, with a table for each class.

Part of the executable specification (docs/FORMAT.md, "dense").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter
from weightwire.codec.block_frame import DENSE, LINES, entropy_coded, read_entropy_coded
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
from weightwire.codec.frequency_tables import SCALE, Shares
from weightwire.codec.marks import Bools, Marks, lines_pay, marked, read_marks, write_marks
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

__all__ = ["decode_dense", "encode_dense"]

_UNCHANGED: Shares = (SCALE,)  # the table of a class without a change: it costs nothing


@dataclass(frozen=True)
class _DensePlan:
    """The units of the active lines before they are written: their classes, symbols and steps."""

    classes: npt.NDArray[np.uint8]
    symbols: npt.NDArray[np.uint8]  # 0: unchanged, else that of the step + 1
    steps: Steps
    present: list[int]
    tables: list[StepTable]

    @staticmethod
    def of(old: Units, new: Units, dtype: Dtype, bounds: Bounds) -> _DensePlan:
        classes, changed = classes_of(old, dtype, bounds), old != new
        steps = Steps.of(steps_between(old[changed], new[changed], dtype), dtype)
        symbols = np.zeros(len(old), np.uint8)
        symbols[changed] = steps.symbols + np.uint8(1)
        present = [c for c in range(CLASSES) if (changed & (classes == c)).any()]
        tables = []
        for c in present:
            within = classes[changed] == c
            unchanged = int((classes == c).sum()) - int(within.sum())
            tables.append(StepTable.of(steps.symbols[within], unchanged))
        return _DensePlan(classes, symbols, steps, present, share_tables(tables))

    def section(self) -> Section:
        tables = [table.shares(dense=True) for table in self.tables]
        return Section(self.symbols, *_tables_by_class(self.present, tables, self.classes))


def _tables_by_class(
    present: list[int], tables: list[Shares], classes: npt.NDArray[np.uint8]
) -> tuple[list[Shares], npt.NDArray[np.uint8]]:
    """All tables of a section, and the table of each unit."""
    number = np.full(CLASSES, len(tables), np.uint8)
    number[present] = np.arange(len(tables))
    return [*tables, _UNCHANGED], number[classes]


def encode_dense(old: Units, new: Units, dtype: Dtype, line: int, bounds: Bounds) -> bytes:
    active = _active_lines(old, new, dtype, line, bounds)
    lines = None
    if active is not None:
        lines = Marks.of(np.flatnonzero(active), len(active))
        within = np.repeat(active, line)
        old, new = old[within], new[within]
    plan = _DensePlan.of(old, new, dtype, bounds)
    bits = BitWriter()
    write_classes(bits, bounds, plan.present, dtype)
    if lines:
        write_marks(bits, lines, 0)
    write_step_tables(bits, plan.tables)
    if lines:
        lines.write_raw(bits)
    bits.numbers(plan.steps.low, plan.steps.widths)
    sections = [*([lines.section()] if lines else []), plan.section()]
    return entropy_coded(DENSE | (LINES if lines else 0), sections) + bits.to_bytes()


def _active_lines(old: Units, new: Units, dtype: Dtype, line: int, bounds: Bounds) -> Bools | None:
    """The lines with changes, or None if it does not pay to list them."""
    if not line:
        return None
    changed, classes = old != new, classes_of(old, dtype, bounds)
    active = changed.reshape(-1, line).any(axis=1)
    inside = classes[np.repeat(active, line)]
    counts = [np.bincount(which, minlength=CLASSES).tolist() for which in (classes, inside, classes[changed])]
    return active if lines_pay(active, *counts) else None


def decode_dense(data: memoryview, old: Units, dtype: Dtype, line: int) -> Units:
    decoder, rest = read_entropy_coded(data)
    bits = BitReader(rest)
    bounds, present = read_classes(bits, dtype)
    within = np.ones(len(old), bool)
    lines = None
    if data[0] & LINES:
        if not line:
            raise ValueError("it lists lines where there are none")
        lines = read_marks(bits, len(old) // line, 0)
    tables = read_step_tables(bits, len(present), dtype, dense=True)
    if lines:
        listed = lines.ranks(decoder, bits, len(old) // line)
        within = np.repeat(marked(listed, len(old) // line, lines.complement), line)
    before = old[within]
    classes = classes_of(before, dtype, bounds)
    steps = _read_steps(decoder, bits, *_tables_by_class(present, tables, classes), dtype)
    decoder.finish()
    bits.finish()
    new = old.copy()
    new[within] = unorder(order(before, dtype) + steps.astype(old.dtype), dtype)
    return new


def _read_steps(
    decoder: Decoder, bits: BitReader, tables: list[Shares], which: npt.NDArray[np.uint8], dtype: Dtype
) -> npt.NDArray[np.uint64]:
    """The step of each unit, 0 if it did not change."""
    symbols = decoder.mixed(tables, which).astype(np.int64)
    changed = np.flatnonzero(symbols)
    least, widths = magnitudes_of((symbols[changed] - 1) >> 1, dtype)
    magnitudes = least + bits.numbers(widths)
    steps = np.zeros(len(symbols), np.uint64)
    steps[changed] = np.where(symbols[changed] & 1, magnitudes, -magnitudes)
    return steps
