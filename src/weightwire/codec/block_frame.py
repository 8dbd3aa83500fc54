"""The start of every block: a tag and the entropy-coded part.

Part of the executable specification (docs/FORMAT.md, "Entropy coder").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightwire.codec import rans
from weightwire.codec.bit_stream import read_uvarint, uvarint

__all__ = ["DENSE", "FULL", "LANES", "LINES", "ULP", "entropy_coded", "read_entropy_coded"]

ULP, DENSE, FULL = 1, 2, 3
LANES = (1, 4, 16)  # bits 2 and 3 of a block's first byte are an index of these
LINES = 16  # a flag beside them


def entropy_coded(head: int, sections: Sequence[rans.Section]) -> bytes:
    """The tag, the word count, the states and the words."""
    lanes = rans.lanes_for(sum(len(section.symbols) for section in sections))
    states, words = rans.encode(sections, lanes)
    coded = np.array(states, "<u4").tobytes() + np.array(words, "<u2").tobytes()
    return bytes([head | LANES.index(lanes) << 2]) + uvarint(len(words)) + coded


def read_entropy_coded(data: memoryview) -> tuple[rans.Decoder, memoryview]:
    """A decoder, and the bytes after its words."""
    words, at = read_uvarint(data, 1)
    lanes = LANES[data[0] >> 2 & 3]
    if 4 * lanes + 2 * words > len(data) - at:
        raise ValueError("its entropy-coded part is too short")
    states = np.frombuffer(data, "<u4", lanes, at)
    if (states < 1 << 16).any():
        raise ValueError("its entropy-coded part has an impossible state")
    at += 4 * lanes
    return rans.Decoder(states.tolist(), np.frombuffer(data, "<u2", words, at)), data[at + 2 * words :]
