"""Marks: which members of a class changed, or which lines of a block, as gaps between ranks.

Part of the executable specification (docs/FORMAT.md, "Marks").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter, unzigzag, zigzag
from weightwire.codec.frequency_tables import entropy_of, gap_table, j_of
from weightwire.codec.rans import Decoder, Section, Symbols

__all__ = ["Bools", "MarkRanks", "Marks", "MarksHead", "lines_pay", "marked", "read_marks", "write_marks"]

MarkRanks = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Marks:
    """The marked members of a class, as gap symbols and raw bits. If most are marked, the unmarked ones are coded."""

    complement: bool
    j: int
    symbols: Symbols
    low: npt.NDArray[np.uint64]

    @staticmethod
    def of(ranks: MarkRanks, members: int) -> Marks:
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
        return Marks(complement, j, symbols, (gaps & ((1 << raw) - 1)).view(np.uint64))

    def section(self) -> Section:
        return Section.of(self.symbols, gap_table(self.j)[2])

    def write_raw(self, bits: BitWriter) -> None:
        bits.numbers(self.low, np.full(len(self.low), gap_table(self.j)[0], np.int64))


def write_marks(bits: BitWriter, marks: Marks, expected: int) -> None:
    """The head: all but the gaps."""
    bits.number(marks.complement, 1)
    bits.golomb(len(marks.symbols), 8)
    if len(marks.symbols):
        bits.golomb(zigzag(marks.j - expected), 1)


@dataclass(frozen=True)
class MarksHead:
    complement: bool
    symbols: int
    j: int

    def ranks(self, decoder: Decoder, bits: BitReader, length: int) -> MarkRanks:
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


def read_marks(bits: BitReader, length: int, expected: int) -> MarksHead:
    complement = bool(bits.number(1))
    symbols = bits.golomb(8)
    if symbols > length:
        raise ValueError("it has more marks than weights")
    j = expected
    if symbols:
        j += unzigzag(bits.golomb(1))
        if not 0 <= j <= 127:
            raise ValueError("a gap parameter is out of range")
    return MarksHead(complement, symbols, j)


def marked(listed: MarkRanks, members: int, complement: bool) -> Bools:
    """Which members are marked."""
    if len(listed) and listed[-1] >= members:
        raise ValueError("it marks a weight past the end of its class")
    found = np.zeros(members, bool)
    found[listed] = True
    return ~found if complement else found


def lines_pay(active: Bools, everywhere: Sequence[int], inside: Sequence[int], changed: Sequence[int]) -> bool:
    """True if listing the lines with changes saves more than it costs.

    By class: all members, those of active lines, and those that changed.
    """
    by_class = zip(everywhere, inside, changed, strict=True)
    saved = sum(entropy_of([k, n - k]) - entropy_of([k, m - k]) for n, m, k in by_class)
    listed = int(active.sum())
    return saved > entropy_of([listed, len(active) - listed]) + (64 << 24)
