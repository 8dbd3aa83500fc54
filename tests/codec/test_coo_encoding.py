"""The `coo` encoding: raw positions and values."""

from __future__ import annotations

import numpy as np
import pytest

from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.codec.coo_encoding import BlockChanges, decode_coo, encode_coo
from weightwire.weights.dtypes import DTYPES

BF16 = DTYPES["BF16"]
SMALL = Layout.of(BF16, (100,))
MEDIUM = Layout.of(BF16, (2 * BLOCK + 16,))  # three blocks
HUGE = Layout.of(BF16, (1 << 33,))


def one_block(*changes: tuple[int, int], index: int = 0) -> BlockChanges:
    return index, np.array([at for at, _ in changes], np.int64), np.array([to for _, to in changes], "<u2")


def decoded(data: bytes, layout: Layout, changed: int) -> list[tuple[int, list[int], list[int]]]:
    return [
        (index, np.frombuffer(positions, "<u4").tolist(), np.frombuffer(values, "<u2").tolist())
        for index, positions, values in decode_coo(memoryview(data), layout, changed)
    ]


def test_bytes_are_width_positions_and_values() -> None:
    data = encode_coo([one_block((3, 0x3F80), (99, 0xBF80))], SMALL)
    assert data.hex() == "0400000000000000" + "03000000" + "63000000" + "803f" + "80bf"
    assert decoded(data, SMALL, 2) == [(0, [3, 99], [0x3F80, 0xBF80])]


def test_positions_count_from_the_start_and_are_decoded_by_block() -> None:
    blocks = [one_block((5, 1), index=0), one_block((0, 2), (7, 3), index=2)]
    data = encode_coo(blocks, MEDIUM)
    begin = MEDIUM.span(2)[0]
    assert np.frombuffer(data, "<u4", 3, 8).tolist() == [5, begin, begin + 7]
    assert decoded(data, MEDIUM, 3) == [(0, [5], [1]), (2, [0, 7], [2, 3])]


def test_positions_past_32_bits_take_eight_bytes() -> None:
    last = HUGE.blocks - 1
    data = encode_coo([one_block((4, 9), index=last)], HUGE)
    assert data[:8] == (8).to_bytes(8, "little")
    assert int.from_bytes(data[8:16], "little") == HUGE.span(last)[0] + 4 > 1 << 32
    assert decoded(data, HUGE, 1) == [(last, [4], [9])]


def test_exactly_32_bits_take_four_bytes() -> None:
    assert encode_coo([one_block((0, 1))], Layout.of(DTYPES["U8"], (1 << 32,)))[0] == 4
    assert encode_coo([one_block((0, 1))], Layout.of(DTYPES["U8"], ((1 << 32) + 1,)))[0] == 8


GOOD = encode_coo([one_block((3, 1), (50, 2), (99, 3))], SMALL)


@pytest.mark.parametrize(
    ("data", "changed", "reason"),
    [
        (GOOD, 2, "size does not fit"),
        (GOOD, 4, "size does not fit"),
        (GOOD[:-1], 3, "size does not fit"),
        (GOOD + b"\0", 3, "size does not fit"),
        (b"\x08" + GOOD[1:], 3, "size does not fit"),
        (GOOD[:7] + b"\1" + GOOD[8:], 3, "size does not fit"),
        (b"", 0, "size does not fit"),
        (GOOD[:8] + GOOD[12:16] + GOOD[8:12] + GOOD[16:], 3, "not ascending"),
        (GOOD[:8] + GOOD[12:16] + GOOD[12:16] + GOOD[16:], 3, "not ascending"),
        (GOOD[:16] + (100).to_bytes(4, "little") + GOOD[20:], 3, "past its end"),
    ],
)
def test_malformed_data_is_rejected(data: bytes, changed: int, reason: str) -> None:
    assert decoded(GOOD, SMALL, 3)
    with pytest.raises(ValueError, match=reason):
        decoded(data, SMALL, changed)
