"""The start of every block: tag, word count, states and words."""

from __future__ import annotations

import numpy as np
import pytest

from weightwire.codec.block_frame import FULL, ULP, entropy_coded, read_entropy_coded
from weightwire.codec.frequency_tables import SCALE
from weightwire.codec.rans import Section, Symbols

HALVES = (SCALE // 2, SCALE // 2)


def zeros_and_ones(count: int) -> Symbols:
    return np.array([i % 3 == 0 for i in range(count)], np.uint8)


def test_few_symbols_use_one_lane() -> None:
    block = entropy_coded(ULP, [Section.of(zeros_and_ones(40), HALVES)])
    # 40 bits: two 16-bit words, and 8 bits in the state above its initial 16.
    assert (block[0], block[1], len(block)) == (ULP, 2, 2 + 4 + 2 * 2)


def test_many_symbols_use_four_lanes() -> None:
    block = entropy_coded(FULL, [Section.of(zeros_and_ones(4096), HALVES)])
    assert (block[0], block[1:3], len(block)) == (FULL | 4, b"\x80\x02", 3 + 16 + 256 * 2)


def test_a_large_block_uses_sixteen_lanes() -> None:
    block = entropy_coded(FULL, [Section.of(zeros_and_ones(32768), HALVES)])
    assert (block[0], block[1:3], len(block)) == (FULL | 8, b"\x80\x10", 3 + 64 + 2048 * 2)


def test_the_rest_of_the_block_is_returned() -> None:
    symbols = zeros_and_ones(40)
    decoder, rest = read_entropy_coded(memoryview(entropy_coded(ULP, [Section.of(symbols, HALVES)]) + b"rest"))
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
def test_malformed_frames_are_rejected(block: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_entropy_coded(memoryview(bytes.fromhex(block)))
