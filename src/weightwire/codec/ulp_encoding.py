"""The `ulp` encoding: which units changed, class by class, and by how many steps.

Part of the executable specification (docs/FORMAT.md, "ulp").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightwire.codec import rans
from weightwire.codec.bit_stream import BitReader, BitWriter, unzigzag, zigzag
from weightwire.codec.block_frame import LINES, ULP, Sections, entropy_coded, read_entropy_coded
from weightwire.codec.exponent_classes import (
    CLASSES,
    ZERO_CLASS,
    Bounds,
    Units,
    choose_bounds,
    classes_of,
    order,
    unorder,
)
from weightwire.codec.frequency_tables import (
    Levels,
    Shares,
    entropy_of,
    gap_table,
    j_of,
    lg,
    quantise,
    read_levels,
    shares,
    split,
    write_levels,
)
from weightwire.weights import Dtype

__all__ = ["Positions", "decode_ulp", "encode_ulp"]

_TOKENS = {1: 31, 2: 63, 4: 79, 8: 111}  # tokens of magnitudes by width: 1..15, then 4 per octave, above 2^16 one
_BALANCED = 128
_FIRST_J = 20

_MarkRanks = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint32]


# --- steps -----------------------------------------------------------------------------------------------------


def _step(old: Units, new: Units, dtype: Dtype) -> npt.NDArray[np.int64]:
    """order(new) - order(old), wrapped to the width of a unit."""
    difference = order(new, dtype) - order(old, dtype)
    return difference.view(difference.dtype.str.replace("u", "i")).astype(np.int64)


def _tokens_of(magnitudes: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each magnitude its token, and the number of low bits that are sent raw."""
    octave = np.zeros(len(magnitudes), np.int64)
    for bit in range(1, int(magnitudes.max(initial=0)).bit_length()):
        octave[magnitudes >> np.uint64(bit) > 0] = bit
    sub = (magnitudes >> np.maximum(octave - 2, 0).astype(np.uint64)).astype(np.int64) & 3
    token = np.where(octave < 16, 15 + (octave - 4) * 4 + sub, 63 + octave - 16)
    raw = np.where(octave < 16, octave - 2, octave)
    direct = octave < 4
    return np.where(direct, magnitudes.astype(np.int64) - 1, token), np.where(direct, 0, raw)


def _magnitudes_of(tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """For each token its least magnitude, and the number of raw bits to add."""
    octave = np.where(tokens < 63, (tokens - 15) // 4 + 4, tokens - 63 + 16)
    raw = np.where(tokens < 63, octave - 2, octave)
    sub = np.where(tokens < 63, (tokens - 15) % 4 + 4, 1)
    direct = tokens < 15
    raw = np.where(direct, 0, raw)
    return np.where(direct, tokens + 1, sub).astype(np.uint64) << raw.astype(np.uint64), raw


@dataclass(frozen=True)
class _Steps:
    """The steps of one class, as symbols (magnitude token * 2, + 1 if negative) and raw bits."""

    symbols: rans.Symbols
    low: npt.NDArray[np.uint64]
    widths: npt.NDArray[np.int64]

    @staticmethod
    def of(steps: npt.NDArray[np.int64]) -> _Steps:
        magnitudes = np.where(steps < 0, -steps, steps).view(np.uint64)
        tokens, widths = _tokens_of(magnitudes)
        low = magnitudes & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))
        return _Steps((tokens * 2 + (steps < 0)).astype(np.uint8), low, widths)


@dataclass(frozen=True)
class _StepTable:
    """The table of one class, or of several neighbours that share it."""

    counts: npt.NDArray[np.int64]  # of magnitude tokens
    positive: int

    @staticmethod
    def of(steps: _Steps) -> _StepTable:
        counts = np.bincount(steps.symbols >> 1, minlength=_TOKENS[8])
        return _StepTable(counts, int((steps.symbols & 1 == 0).sum()))

    def __add__(self, other: _StepTable) -> _StepTable:
        return _StepTable(self.counts + other.counts, self.positive + other.positive)

    @cached_property
    def levels(self) -> Levels:
        return quantise(self.counts)

    @property
    def plus(self) -> int:
        return _bias(self.positive, int(self.counts.sum()))

    def write(self, bits: BitWriter) -> None:
        write_levels(bits, self.levels)
        _write_bias(bits, self.plus)

    def shares(self) -> Shares:
        return _step_table(self.levels, self.plus)

    @cached_property
    def cost(self) -> int:
        """The steps and the table, in units of 2^-24 bits."""
        bits = BitWriter()
        self.write(bits)
        signs = entropy_of([self.positive, int(self.counts.sum()) - self.positive])
        return entropy_of(self.counts.tolist()) + signs + (bits.width << 24)


def _share_tables(steps: list[_Steps]) -> list[_StepTable]:
    """The table of each class. A class shares the table of the one before if that is shorter."""
    groups: list[list[_StepTable]] = []
    for one in map(_StepTable.of, steps):
        if groups and (both := groups[-1][0] + one).cost <= groups[-1][0].cost + one.cost:
            groups[-1] = [both] * (len(groups[-1]) + 1)
        else:
            groups.append([one])
    return [table for group in groups for table in group]


def _bias(positive: int, total: int) -> int:
    """The probability of a positive step, of 256. A bias that does not pay for its byte counts as balanced."""
    if positive in (0, total):
        return 256 if positive else 0
    if (2 * positive - total) ** 2 <= 11 * total:
        return _BALANCED
    return min(255, max(1, (512 * positive + total) // (2 * total)))


def _step_table(levels: Levels, plus: int) -> Shares:
    return split(shares(levels, 1 if plus in (0, 256) else 2), plus)


def _write_bias(bits: BitWriter, plus: int) -> None:
    bits.number({_BALANCED: 0, 256: 1, 0: 2}.get(plus, 3), 2)
    if plus not in (_BALANCED, 256, 0):
        bits.number(plus, 8)


def _read_bias(bits: BitReader) -> int:
    plus = (_BALANCED, 256, 0, -1)[bits.number(2)]
    if plus < 0:
        plus = bits.number(8)
        if plus == 0:
            raise ValueError("a sign table is out of range")
    return plus


# --- marks: ranks as gaps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Marks:
    """The marked members of a class, as gap symbols and raw bits. If most are marked, the unmarked ones are coded."""

    complement: bool
    j: int
    symbols: rans.Symbols
    low: npt.NDArray[np.uint64]

    @staticmethod
    def of(ranks: _MarkRanks, members: int) -> _Marks:
        complement = 2 * len(ranks) > members
        if complement:
            unmarked = np.ones(members, bool)
            unmarked[ranks] = False
            ranks = np.flatnonzero(unmarked)
        j = j_of(members, len(ranks)) if len(ranks) else 0
        raw, go_on, _ = gap_table(j)
        gaps = np.diff(ranks, prepend=-1) - 1
        quotients = gaps >> raw
        ends = np.cumsum(quotients // go_on + 1) - 1
        symbols = np.full(int(ends[-1]) + 1 if len(ends) else 0, go_on, np.uint8)
        symbols[ends] = quotients % go_on
        return _Marks(complement, j, symbols, (gaps & ((1 << raw) - 1)).view(np.uint64))

    @property
    def raw(self) -> int:
        return gap_table(self.j)[0]

    def table(self) -> Shares:
        return gap_table(self.j)[2]

    def widths(self) -> npt.NDArray[np.int64]:
        return np.full(len(self.low), self.raw, np.int64)


def _write_marks(bits: BitWriter, marks: _Marks, expected: int) -> None:
    bits.number(marks.complement, 1)
    bits.golomb(len(marks.symbols), 8)
    if len(marks.symbols):
        bits.golomb(zigzag(marks.j - expected), 1)


@dataclass(frozen=True)
class _MarksHead:
    complement: bool
    symbols: int
    j: int

    def ranks(self, decoder: rans.Decoder, bits: BitReader, length: int) -> _MarkRanks:
        raw, go_on, table = gap_table(self.j)
        symbols = decoder.section(self.symbols, table).astype(np.int64)
        if len(symbols) and symbols[-1] == go_on:
            raise ValueError("a gap does not end")
        ends = np.flatnonzero(symbols != go_on)
        if raw and int(symbols.sum()) << raw > length:  # before the shift below can overflow
            raise ValueError("it marks a weight past its end")
        low = bits.numbers(np.full(len(ends), raw, np.int64)).view(np.int64)
        upto = np.cumsum(symbols)[ends]
        quotients = np.diff(upto, prepend=0)
        return np.cumsum((quotients << raw) + low + 1) - 1


def _read_marks(bits: BitReader, length: int, expected: int) -> _MarksHead:
    complement = bool(bits.number(1))
    symbols = bits.golomb(8)
    if symbols > length:
        raise ValueError("it has more marks than weights")
    j = expected
    if symbols:
        j += unzigzag(bits.golomb(1))
        if not 0 <= j <= 127:
            raise ValueError("a gap parameter is out of range")
    return _MarksHead(complement, symbols, j)


# --- ulp ---------------------------------------------------------------------------------------------------------


def _cost(members: int, marked: int) -> int:
    """The entropy of the marks, in units of 2^-24 bits."""
    if marked in (0, members):
        return 0
    rest = members - marked
    return members * lg(members) - marked * lg(marked) - rest * lg(rest)


def _lines_pay(classes: npt.NDArray[np.uint8], changed: npt.NDArray[np.bool_], active: npt.NDArray[np.bool_]) -> bool:
    """True if listing the lines with changes saves more than it costs."""
    within = np.repeat(active, len(changed) // len(active))
    everywhere = np.bincount(classes, minlength=CLASSES).tolist()
    inside = np.bincount(classes[within], minlength=CLASSES).tolist()
    marked = np.bincount(classes[changed], minlength=CLASSES).tolist()
    saved = sum(_cost(n, k) - _cost(m, k) for n, m, k in zip(everywhere, inside, marked, strict=True))
    return saved > _cost(len(active), int(active.sum())) + (64 << 24)


@dataclass(frozen=True)
class _Plan:
    """The changes of a block before they are written: marks and steps of every class that has changes."""

    bounds: Bounds
    present: list[int]
    lines: _Marks | None
    marks: list[_Marks]
    steps: list[_Steps]
    tables: list[_StepTable]

    @staticmethod
    def of(old: Units, new: Units, dtype: Dtype, line: int) -> _Plan:
        bounds = choose_bounds(old, new, dtype)
        classes = classes_of(old, dtype, bounds)
        changed = old != new
        lines: _Marks | None = None
        if line:
            active = changed.reshape(-1, line).any(axis=1)
            if _lines_pay(classes, changed, active):
                lines = _Marks.of(np.flatnonzero(active), len(active))
                within = np.repeat(active, line)
                old, new, classes, changed = old[within], new[within], classes[within], changed[within]
        present, marks, steps = [], [], []
        for c in range(CLASSES):
            member = classes == c
            here = member & changed
            if here.any():
                present.append(c)
                marks.append(_Marks.of(np.flatnonzero(changed[member]), int(member.sum())))
                steps.append(_Steps.of(_step(old[here], new[here], dtype)))
        return _Plan(bounds, present, lines, marks, steps, _share_tables(steps))

    @property
    def all_marks(self) -> list[_Marks]:
        return [*([self.lines] if self.lines else []), *self.marks]

    def sections(self) -> Sections:
        return [(m.symbols, m.table()) for m in self.all_marks] + [
            (s.symbols, t.shares()) for s, t in zip(self.steps, self.tables, strict=True)
        ]

    def write_heads(self, bits: BitWriter, dtype: Dtype) -> None:
        _write_bounds(bits, self.bounds, dtype)
        for c in (*range(len(self.bounds) + 1), ZERO_CLASS):
            bits.number(c in self.present, 1)
        if self.lines:
            _write_marks(bits, self.lines, 0)
        expected = _FIRST_J
        for m, s in zip(self.marks, self.steps, strict=True):
            _write_marks(bits, m, expected)
            if m.complement:
                bits.golomb(len(s.symbols) - 1, 8)
            expected = _next_j(m.j if len(m.symbols) else expected)
        before = None
        for table in self.tables:
            if before is not None:
                bits.number(table is before, 1)
            if table is not before:
                table.write(bits)
            before = table

    def write_raw(self, bits: BitWriter) -> None:
        for m in self.all_marks:
            bits.numbers(m.low, m.widths())
        for s in self.steps:
            bits.numbers(s.low, s.widths)


def encode_ulp(old: Units, new: Units, dtype: Dtype, line: int) -> bytes:
    plan = _Plan.of(old, new, dtype, line)
    bits = BitWriter()
    plan.write_heads(bits, dtype)
    plan.write_raw(bits)
    return entropy_coded(ULP | (LINES if plan.lines else 0), plan.sections()) + bits.to_bytes()


def _write_bounds(bits: BitWriter, bounds: Bounds, dtype: Dtype) -> None:
    bits.number(len(bounds), 4)
    for i, bound in enumerate(bounds):
        if i == 0:
            bits.number(bound, dtype.exponent)
        else:
            bits.golomb(bounds[i - 1] - bound - 1, 0)


def _read_bounds(bits: BitReader, dtype: Dtype) -> Bounds:
    count = bits.number(4)
    if count > (CLASSES - 2 if dtype.exponent else 0):
        raise ValueError("it has too many classes")
    bounds: list[int] = []
    for _ in range(count):
        bounds.append(bounds[-1] - bits.golomb(0) - 1 if bounds else bits.number(dtype.exponent))
        if bounds[-1] < 1:
            raise ValueError("a class is out of range")
    return tuple(bounds)


def _next_j(j: int) -> int:
    """The expected parameter of the next class, which has half the ulp and twice the rate."""
    return max(0, j - 4)


@dataclass(frozen=True)
class _ClassHead:
    """The header of one class."""

    number: int
    marks: _MarksHead
    steps: int  # only for complements
    table: Shares


@dataclass(frozen=True)
class _Heads:
    bounds: Bounds
    lines: _MarksHead | None
    classes: list[_ClassHead]


def decode_ulp(data: memoryview, old: Units, dtype: Dtype, line: int) -> tuple[Positions, Units]:
    decoder, rest = read_entropy_coded(data)
    bits = BitReader(rest)
    heads = _read_heads(bits, len(old), dtype, line, has_lines=bool(data[0] & LINES))
    where = np.arange(len(old))
    if heads.lines:
        listed = heads.lines.ranks(decoder, bits, len(old) // line)
        where = where.reshape(-1, line)[_marked(listed, len(old) // line, heads.lines.complement)].ravel()
    ranks = [head.marks.ranks(decoder, bits, len(old)) for head in heads.classes]
    positions = []
    values = []
    classes = classes_of(old[where], dtype, heads.bounds)
    for head, listed in zip(heads.classes, ranks, strict=True):
        members = where[classes == head.number]
        here = members[_marked(listed, len(members), head.marks.complement)]
        if head.marks.complement and len(here) != head.steps:
            raise ValueError("the number of steps differs from the number of changes")
        positions.append(here)
        steps = _read_steps(decoder, bits, len(here), head.table)
        values.append(unorder(order(old[here], dtype) + steps.astype(old.dtype), dtype))
    decoder.finish()
    bits.finish()
    if not positions:
        raise ValueError("it changes nothing")
    at = np.concatenate(positions)
    sort = np.argsort(at)
    return at[sort].astype(np.uint32), np.concatenate(values)[sort]


def _read_heads(bits: BitReader, count: int, dtype: Dtype, line: int, *, has_lines: bool) -> _Heads:
    bounds = _read_bounds(bits, dtype)
    present = [c for c in (*range(len(bounds) + 1), ZERO_CLASS) if bits.number(1)]
    if has_lines and not line:
        raise ValueError("it lists lines where there are none")
    lines = _read_marks(bits, count // line, 0) if has_lines else None
    marks: list[_MarksHead] = []
    steps: list[int] = []
    expected = _FIRST_J
    for _ in present:
        marks.append(_read_marks(bits, count - sum(one.symbols for one in marks), expected))
        steps.append(bits.golomb(8) + 1 if marks[-1].complement else 0)
        if not marks[-1].complement and not marks[-1].symbols:
            raise ValueError("it lists a class without a change")
        if sum(steps) > count:
            raise ValueError("it has more steps than weights")
        expected = _next_j(marks[-1].j)
    tables: list[Shares] = []
    for _ in present:
        same = bool(tables) and bits.number(1)
        tables.append(tables[-1] if same else _step_table(read_levels(bits, _TOKENS[dtype.unit]), _read_bias(bits)))
    return _Heads(bounds, lines, [_ClassHead(*one) for one in zip(present, marks, steps, tables, strict=True)])


def _marked(listed: _MarkRanks, members: int, complement: bool) -> npt.NDArray[np.bool_]:
    if len(listed) and listed[-1] >= members:
        raise ValueError("it marks a weight past the end of its class")
    marked = np.zeros(members, bool)
    marked[listed] = True
    return ~marked if complement else marked


def _read_steps(decoder: rans.Decoder, bits: BitReader, count: int, table: Shares) -> npt.NDArray[np.uint64]:
    symbols = decoder.section(count, table).astype(np.int64)
    least, widths = _magnitudes_of(symbols >> 1)
    magnitudes = least + bits.numbers(widths)
    return np.where(symbols & 1, -magnitudes, magnitudes)
