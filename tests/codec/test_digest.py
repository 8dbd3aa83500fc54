"""The terms of the digest: pinned values, and sensitivity to words and indices."""

from __future__ import annotations

import numpy as np
import pytest

from support.samples import words
from weightwire.codec.digest import digest_words


def of(*pairs: tuple[int, int]) -> tuple[int, int]:
    """The digest of (index, word) pairs."""
    return digest_words(np.array([w for _, w in pairs], np.uint64), np.array([i for i, _ in pairs], np.uint64))


def reference(index: int, word: int) -> tuple[int, int]:
    """docs/FORMAT.md, "State digest", word for word."""
    mask = 2**64 - 1
    a = (word + (index + 1) * 0x9E3779B97F4A7C15) & mask
    a ^= a >> 32
    a = a * 0xD6E8FEB86659FD93 & mask
    a ^= a >> 32
    a = a * 0xD6E8FEB86659FD93 & mask
    a ^= a >> 32
    b = ((word ^ 0xC2B2AE3D27D4EB4F) + (index + 1) * 0xA0761D6478BD642F) & mask
    b ^= b >> 30
    b = b * 0xBF58476D1CE4E5B9 & mask
    b ^= b >> 27
    b = b * 0x94D049BB133111EB & mask
    b ^= b >> 31
    return a, b


@pytest.mark.parametrize("index", [0, 1, 2**32, 2**61])
@pytest.mark.parametrize("word", [0, 1, 0x8000, 2**64 - 1])
def test_one_term_equals_the_reference(index: int, word: int) -> None:
    assert of((index, word)) == reference(index, word)


def test_the_digest_of_no_words_is_zero() -> None:
    assert of() == (0, 0)


def test_order_does_not_matter() -> None:
    values = words(1, 500)
    indices = np.arange(500, dtype=np.uint64)
    shuffled = np.argsort(words(2, 500))
    whole = digest_words(values, indices)
    assert digest_words(values[shuffled], indices[shuffled]) == whole
    halves = [digest_words(values[part], indices[part]) for part in (slice(0, 123), slice(123, None))]
    assert tuple(sum(lanes) % 2**64 for lanes in zip(*halves, strict=True)) == whole


def test_the_first_terms_of_small_numbers_all_differ() -> None:
    """Weights have neighbouring indices and words. No two of them may have equal terms."""
    lanes = [reference(index, word) for index in range(60) for word in range(60)]
    assert len({a for a, _ in lanes}) == len({b for _, b in lanes}) == len(lanes)


def test_swapping_two_words_changes_the_digest() -> None:
    here, there = of((3, 77), (9, 88)), of((3, 88), (9, 77))
    assert here[0] != there[0]
    assert here[1] != there[1]


def test_every_bit_changes_both_sums() -> None:
    plain = of((5, 0))
    for bit in range(64):
        flipped = of((5, 1 << bit))
        assert flipped[0] != plain[0]
        assert flipped[1] != plain[1]
