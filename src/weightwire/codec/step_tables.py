"""Steps on the number line: tokens and raw bits of magnitudes, and tables that neighbouring classes may share.

Part of the executable specification (docs/FORMAT.md, "Steps").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter
from weightwire.codec.exponent_classes import Units, order
from weightwire.codec.frequency_tables import (
    Levels,
    Shares,
    entropy_of,
    quantise,
    read_levels,
    shares,
    split,
    write_levels,
)
from weightwire.weights import Dtype

__all__ = [
    "StepTable",
    "Steps",
    "magnitudes_of",
    "read_step_tables",
    "share_tables",
    "steps_between",
    "write_step_tables",
]

_TOKENS = {1: 31, 2: 63, 4: 79, 8: 111}  # of floats by width: one for each of 1..15, then 4 an octave, from 2^16 on 1
_PLAIN_TOKENS = 128  # of bytes that are not floats: one for each magnitude
_MOST_TOKENS = max(_PLAIN_TOKENS, *_TOKENS.values())
_BALANCED = 128

Integers = npt.NDArray[np.int64]


def steps_between(old: Units, new: Units, dtype: Dtype) -> npt.NDArray[np.int64]:
    """order(new) - order(old), wrapped to the width of a unit. For bytes that are not floats, from -127 to 128."""
    difference = order(new, dtype) - order(old, dtype)
    steps: npt.NDArray[np.int64] = difference.view(difference.dtype.str.replace("u", "i")).astype(np.int64)
    return steps if dtype.is_float else np.where(steps == -128, 128, steps)


def _tokens_of(magnitudes: npt.NDArray[np.uint64], dtype: Dtype) -> tuple[Integers, Integers]:
    """For each magnitude its token, and the number of low bits that are sent raw."""
    if not dtype.is_float:
        return magnitudes.astype(np.int64) - 1, np.zeros(len(magnitudes), np.int64)
    octave = np.zeros(len(magnitudes), np.int64)
    for bit in range(1, int(magnitudes.max(initial=0)).bit_length()):
        octave[magnitudes >> np.uint64(bit) > 0] = bit
    sub = (magnitudes >> np.maximum(octave - 2, 0).astype(np.uint64)).astype(np.int64) & 3
    token = np.where(octave < 16, 15 + (octave - 4) * 4 + sub, 63 + octave - 16)
    raw = np.where(octave < 16, octave - 2, octave)
    direct = octave < 4
    return np.where(direct, magnitudes.astype(np.int64) - 1, token), np.where(direct, 0, raw)


def magnitudes_of(tokens: Integers, dtype: Dtype) -> tuple[npt.NDArray[np.uint64], Integers]:
    """For each token its least magnitude, and the number of raw bits to add."""
    if not dtype.is_float:
        return (tokens + 1).astype(np.uint64), np.zeros(len(tokens), np.int64)
    octave = np.where(tokens < 63, (tokens - 15) // 4 + 4, tokens - 63 + 16)
    raw = np.where(tokens < 63, octave - 2, octave)
    sub = np.where(tokens < 63, (tokens - 15) % 4 + 4, 1)
    direct = tokens < 15
    raw = np.where(direct, 0, raw)
    return np.where(direct, tokens + 1, sub).astype(np.uint64) << raw.astype(np.uint64), raw


@dataclass(frozen=True)
class Steps:
    """Steps as symbols (magnitude token * 2, + 1 if negative) and raw bits."""

    symbols: npt.NDArray[np.uint8]
    low: npt.NDArray[np.uint64]
    widths: Integers

    @staticmethod
    def of(steps: npt.NDArray[np.int64], dtype: Dtype) -> Steps:
        magnitudes = np.where(steps < 0, -steps, steps).view(np.uint64)
        tokens, widths = _tokens_of(magnitudes, dtype)
        low = magnitudes & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))
        return Steps((tokens * 2 + (steps < 0)).astype(np.uint8), low, widths)


@dataclass(frozen=True)
class StepTable:
    """The table of one class, or of several neighbours that share it."""

    counts: Integers  # of what has a level: of magnitude tokens and, in a dense block, before them of unchanged units
    positive: int
    total: int  # steps

    @staticmethod
    def of(symbols: npt.NDArray[np.uint8], unchanged: int | None = None) -> StepTable:
        """`unchanged` is given for a dense block only."""
        counts = np.bincount(symbols >> 1, minlength=_MOST_TOKENS)
        if unchanged is not None:
            counts = np.concatenate([[unchanged], counts])
        return StepTable(counts, int((symbols & 1 == 0).sum()), len(symbols))

    def __add__(self, other: StepTable) -> StepTable:
        return StepTable(self.counts + other.counts, self.positive + other.positive, self.total + other.total)

    @cached_property
    def levels(self) -> Levels:
        return quantise(self.counts)

    @property
    def plus(self) -> int:
        return _bias(self.positive, self.total)

    def write(self, bits: BitWriter) -> None:
        write_levels(bits, self.levels)
        _write_bias(bits, self.plus)

    def shares(self, *, dense: bool = False) -> Shares:
        return _shares_of(self.levels, self.plus, dense=dense)

    @cached_property
    def cost(self) -> int:
        """The symbols and the table, in units of 2^-24 bits."""
        bits = BitWriter()
        self.write(bits)
        signs = entropy_of([self.positive, self.total - self.positive])
        return entropy_of(self.counts.tolist()) + signs + (bits.width << 24)


def share_tables(tables: Sequence[StepTable]) -> list[StepTable]:
    """The table of each class. A class shares the table of the one before if that is shorter."""
    groups: list[list[StepTable]] = []
    for one in tables:
        if groups and (both := groups[-1][0] + one).cost <= groups[-1][0].cost + one.cost:
            groups[-1] = [both] * (len(groups[-1]) + 1)
        else:
            groups.append([one])
    return [table for group in groups for table in group]


def write_step_tables(bits: BitWriter, tables: Sequence[StepTable]) -> None:
    before = None
    for table in tables:
        if before is not None:
            bits.number(table is before, 1)
        if table is not before:
            table.write(bits)
        before = table


def read_step_tables(bits: BitReader, classes: int, dtype: Dtype, *, dense: bool = False) -> list[Shares]:
    tables: list[Shares] = []
    for _ in range(classes):
        if tables and bits.number(1):
            tables.append(tables[-1])
            continue
        levels = read_levels(bits, (_TOKENS[dtype.unit] if dtype.is_float else _PLAIN_TOKENS) + dense)
        if len(levels) == 1 and dense:
            raise ValueError("it lists a class without a change")
        tables.append(_shares_of(levels, _read_bias(bits), dense=dense))
    return tables


def _shares_of(levels: Levels, plus: int, *, dense: bool = False) -> Shares:
    """The shares of all symbols. The first level of a dense block is that of unchanged units, which have no sign."""
    slots = shares(levels, 1 if plus in (0, 256) else 2)
    last = dense + _PLAIN_TOKENS - 1  # for one step, which has no other sign
    return (*slots[:dense], *split(slots[dense:last], plus), *slots[last:])


def _bias(positive: int, total: int) -> int:
    """The probability of a positive step, of 256. A bias that does not pay for its byte counts as balanced."""
    if positive in (0, total):
        return 256 if positive else 0
    if (2 * positive - total) ** 2 <= 11 * total:
        return _BALANCED
    return min(255, max(1, (512 * positive + total) // (2 * total)))


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
