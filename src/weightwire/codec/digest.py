"""The terms of the state digest: two 64-bit sums over (index, word).

Part of the executable specification (docs/FORMAT.md, "State digest"). A sum does not depend on order, so shards and
threads can add up their parts, and an update costs only as much as changed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Words", "digest_terms", "digest_words"]

Words = npt.NDArray[np.uint64]

_U = np.uint64


def digest_words(words: Words, indices: Words) -> tuple[int, int]:
    """The two sums for these words at these indices."""
    a, b = digest_terms(words, indices)
    return int(a.sum(dtype=_U)), int(b.sum(dtype=_U))


def digest_terms(words: Words, indices: Words) -> tuple[Words, Words]:
    """What each word adds to the two sums."""
    places = indices + _U(1)
    a = words + places * _U(0x9E3779B97F4A7C15)
    a ^= a >> _U(32)
    a *= _U(0xD6E8FEB86659FD93)
    a ^= a >> _U(32)
    a *= _U(0xD6E8FEB86659FD93)
    a ^= a >> _U(32)
    b = (words ^ _U(0xC2B2AE3D27D4EB4F)) + places * _U(0xA0761D6478BD642F)
    b ^= b >> _U(30)
    b *= _U(0xBF58476D1CE4E5B9)
    b ^= b >> _U(27)
    b *= _U(0x94D049BB133111EB)
    b ^= b >> _U(31)
    return a, b
