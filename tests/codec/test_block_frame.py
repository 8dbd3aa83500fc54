"""The start of every block: a tag, how many words, states, words."""

from __future__ import annotations

import numpy as np
import pytest

from weightwire.codec.block_frame import FULL, ULP, entropy_coded, read_entropy_coded
from weightwire.codec.frequency_tables import SCALE
from weightwire.codec.rans import Symbols

HALVES = (SCALE // 2, SCALE // 2)


def zeros_and_ones(count: int) -> Symbols:
    return np.array([i % 3 == 0 for i in range(count)], np.uint8)


def test_one_lane() -> None:
    block = entropy_coded(ULP, [(zeros_and_ones(40), HALVES)])
    # 40 bits: two words of 16, and 8 in the state on top of the 16 it began with.
    assert (block[0], block[1], len(block)) == (ULP, 2, 2 + 4 + 2 * 2)


def test_four_lanes() -> None:
    block = entropy_coded(FULL, [(zeros_and_ones(1024), HALVES)])
    assert (block[0], block[1], len(block)) == (FULL | 4, 64, 2 + 16 + 64 * 2)


def test_what_follows_is_handed_on() -> None:
    symbols = zeros_and_ones(40)
    decoder, rest = read_entropy_coded(memoryview(entropy_coded(ULP, [(symbols, HALVES)]) + b"rest"))
    assert decoder.section(40, HALVES).tobytes() == symbols.tobytes()
    decoder.finish()
    assert bytes(rest) == b"rest"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("01", "ends inside a number"),
        ("0180", "ends inside a number"),
        ("018000", "shortest form"),
        ("0100", "too short"),
        ("0100ffffff", "too short"),
        ("0101ffffffff00", "too short"),
        ("0500ffffffffffffffffffffffff", "too short"),
        ("01ffffffffffffffffff01ffffffff", "too short"),
        ("0100ffff0000", "impossible state"),
        ("050000000100000001000000010000000000", "impossible state"),
    ],
)
def test_what_is_no_start(block: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_entropy_coded(memoryview(bytes.fromhex(block)))
