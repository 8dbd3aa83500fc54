"""The entropy coder: interleaved rANS over sections of symbols.

Part of the executable specification (docs/FORMAT.md, "Entropy coder"). 32-bit states, 16-bit words, 12-bit tables.
Lane i mod lanes codes symbol i of a section. All lanes share one sequence of words.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec.frequency_tables import SCALE, Shares

__all__ = ["Decoder", "Section", "Symbols", "encode", "lanes_for"]

Symbols = npt.NDArray[np.uint8]
_LOW = 1 << 16


@dataclass(frozen=True)
class Section:
    """Symbols, the tables of the section, and which of them each symbol has."""

    symbols: Symbols
    tables: Sequence[Shares]
    which: npt.NDArray[np.uint8]

    @staticmethod
    def of(symbols: Symbols, shares: Shares) -> Section:
        """A section with one table."""
        return Section(symbols, [shares], np.zeros(len(symbols), np.uint8))


def lanes_for(symbols: int) -> int:
    """Lanes hide latency and fill vectors. For few symbols, fewer lanes save bytes."""
    return 1 if symbols < 4096 else 4 if symbols < 32768 else 16


def encode(sections: Sequence[Section], lanes: int) -> tuple[list[int], list[int]]:
    """The final states and the words, in the order in which the decoder reads them."""
    states = [_LOW] * lanes
    words: list[int] = []
    for section in reversed(sections):
        starts = [[0, *itertools.accumulate(shares)] for shares in section.tables]
        values, which = section.symbols.tolist(), section.which.tolist()
        for i in range(len(values) - 1, -1, -1):
            share = section.tables[which[i]][values[i]]
            x = states[i % lanes]
            if x >= share << 20:
                words.append(x & 0xFFFF)
                x >>= 16
            states[i % lanes] = (x // share << 12) + x % share + starts[which[i]][values[i]]
    return states, words[::-1]


class Decoder:
    """Decodes sections in the order in which they were passed to `encode`."""

    def __init__(self, states: Sequence[int], words: npt.NDArray[np.uint16]) -> None:
        self._states = list(states)
        self._words = words.tolist()
        self._at = 0

    def section(self, count: int, shares: Shares) -> Symbols:
        """The symbols of a section with one table."""
        return self.mixed([shares], np.zeros(count, np.uint8))

    def mixed(self, tables: Sequence[Shares], which: npt.NDArray[np.uint8]) -> Symbols:
        """The symbols of a section, of which each has the table `which`."""
        symbol_of = [np.repeat(np.arange(len(shares)), shares).tolist() for shares in tables]
        starts = [[0, *itertools.accumulate(shares)] for shares in tables]
        lanes = len(self._states)
        out = bytearray(len(which))
        for i, t in enumerate(which.tolist()):
            x = self._states[i % lanes]
            slot = x & (SCALE - 1)
            symbol = symbol_of[t][slot]
            x = tables[t][symbol] * (x >> 12) + slot - starts[t][symbol]
            if x < _LOW:
                if self._at >= len(self._words):
                    raise ValueError("its entropy-coded part is too short")
                x = x << 16 | self._words[self._at]
                self._at += 1
            self._states[i % lanes] = x
            out[i] = symbol
        return np.frombuffer(bytes(out), np.uint8)

    def finish(self) -> None:
        """Checks that decoding ended in the initial state of the encoder."""
        if self._at != len(self._words) or any(x != _LOW for x in self._states):
            raise ValueError("its entropy-coded part does not end where it should")
