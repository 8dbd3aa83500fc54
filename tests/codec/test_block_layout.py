"""Layouts: blocks cover every unit once, and lines and words have the right sizes."""

from __future__ import annotations

import pytest

from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.weights.dtypes import DTYPES

BF16, F32, U8, F4 = (DTYPES[name] for name in ("BF16", "F32", "U8", "F4"))


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((), [(0, 1)]),
        ((0,), []),
        ((3, 0), []),
        ((1,), [(0, 1)]),
        ((BLOCK,), [(0, BLOCK)]),
        ((BLOCK + 1,), [(0, BLOCK // 2 + 8), (BLOCK // 2 + 8, BLOCK + 1)]),
        ((4097, 1024), [(0, 2049 * 1024), (2049 * 1024, 4097 * 1024)]),
        ((2**20, 2**20), None),
    ],
)
def test_blocks_cover_everything_once(shape: tuple[int, ...], blocks: list[tuple[int, int]] | None) -> None:
    layout = Layout.of(BF16, shape)
    if blocks is None:
        assert layout.blocks == 2**18
        assert layout.span(2**18 - 1) == (2**40 - BLOCK, 2**40)
    else:
        assert [layout.span(index) for index in range(layout.blocks)] == blocks


@pytest.mark.parametrize("count", [1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5, 10 * BLOCK + 3])
def test_blocks_have_one_size_below_the_limit(count: int) -> None:
    layout = Layout.of(U8, (count,))
    spans = [layout.span(index) for index in range(layout.blocks)]
    sizes = [end - begin for begin, end in spans]
    assert sum(sizes) == count
    assert max(sizes) <= BLOCK
    assert min(sizes) > 0
    assert len(set(sizes[:-1])) <= 1
    assert all(begin % 8 == 0 for begin, _ in spans)


def test_blocks_consist_of_whole_lines() -> None:
    layout = Layout.of(BF16, (151_936, 1000))
    assert layout.line == 1000
    assert layout.block % 1000 == 0
    assert layout.block <= BLOCK


@pytest.mark.parametrize(
    ("name", "shape", "line"),
    [
        ("BF16", (10, 64), 64),
        ("BF16", (10, 63), 0),  # too short
        ("BF16", (10, 66), 0),  # not whole words
        ("F32", (10, 66), 66),
        ("BF16", (640,), 0),  # one dimension
        ("BF16", (4, 5, 128), 128),  # the last dimension, not the row
        ("BF16", (2, 1 << 21), 1 << 21),
        ("BF16", (2, 1 << 22), 0),  # a block would be one line
        ("BF16", (0, 64), 0),
        ("F4", (10, 128), 64),  # packed: 64 bytes
        ("F4", (10, 129), 0),
        ("F6_E2M3", (4, 128), 96),
    ],
)
def test_line_length_follows_dtype_and_shape(name: str, shape: tuple[int, ...], line: int) -> None:
    assert Layout.of(DTYPES[name], shape).line == line


@pytest.mark.parametrize(
    ("name", "shape", "word"),
    [
        ("BF16", (10, 64), 8),
        ("BF16", (10, 3), 2),  # a row is 6 bytes
        ("F32", (10, 3), 4),
        ("F32", (10, 2), 8),
        ("BF16", (64,), 2),  # a row is one element
        ("U8", (3, 2, 4), 8),
        ("F64", (3,), 8),
        ("F64", (), 8),
        ("BF16", (8, 0), 2),
        ("F4", (2, 16), 8),
    ],
)
def test_the_digest_uses_words_if_rows_are_whole_words(name: str, shape: tuple[int, ...], word: int) -> None:
    assert Layout.of(DTYPES[name], shape).word == word


def test_rows_of_a_tensor_keep_their_digest_index() -> None:
    whole, part = Layout.of(BF16, (100, 64)), Layout.of(BF16, (100, 64), (30, 50))
    assert (part.count, part.line, part.word) == (20 * 64, 64, 8)
    assert part.word_index(0) == whole.word_index(30 * 64) == 30 * 16


def test_a_layout_may_have_positions_beyond_32_bits() -> None:
    layout = Layout.of(BF16, (2**24, 1024))
    last = layout.blocks - 1
    assert layout.span(last)[1] == layout.count == 2**34
    assert layout.word_index(layout.span(last)[0]) == layout.span(last)[0] // 4


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((6,), 3),
        ((2, 3), 3),
        ((2, 16), 16),
        ((4, 3, 2), 12),
        ((2, 1, 1), 1),
        ((0,), 0),
    ],
)
def test_units_of_a_packed_dtype_are_its_bytes(shape: tuple[int, ...], count: int) -> None:
    assert Layout.of(F4, shape).count == count


@pytest.mark.parametrize("rows", [None, (1, 10_000)])
def test_a_single_block_keeps_its_bytes_and_digest(rows: tuple[int, int] | None) -> None:
    """Without its neighbours a block has the same bytes and digest."""
    layout = Layout.of(BF16, (10_000, 1024), rows)
    for index in range(layout.blocks):
        begin, end = layout.span(index)
        alone = layout.alone(index)
        assert (alone.blocks, alone.span(0)) == (1, (0, end - begin))
        assert alone.word_index(0) == layout.word_index(begin)
        assert (alone.dtype, alone.line, alone.word) == (layout.dtype, layout.line, layout.word)


def test_blocks_of_rows_cover_exactly_these_rows() -> None:
    layout = Layout.of(F32, (10_000, 1024))  # blocks of 3,334 rows
    assert layout.block == 3334 * 1024
    assert layout.blocks_of_rows(0, 1) == range(1)
    assert layout.blocks_of_rows(3333, 3334) == range(1)
    assert layout.blocks_of_rows(3333, 3335) == range(2)
    assert layout.blocks_of_rows(3334, 10_000) == range(1, 3)
    assert layout.blocks_of_rows(9999, 10_000) == range(2, 3)
    assert len(layout.blocks_of_rows(5, 5)) == 0
    assert len(Layout.of(F32, (10, 0)).blocks_of_rows(0, 10)) == 0


def test_the_blocks_of_a_stack_hold_whole_members() -> None:
    one, layout = Layout.of(BF16, (1000, 1024)), Layout.stack(BF16, (1000, 1024), 8, 3)
    assert [layout.span(index) for index in range(layout.blocks)] == [
        (first * one.count, last * one.count) for first, last in ((0, 3), (3, 6), (6, 8))
    ]
    assert (layout.line, layout.word, layout.segment, layout.count) == (one.line, one.word, one.count, 8 * one.count)
    assert [layout.word_index(unit) for unit in (0, 1024, one.count, 4 * one.count)] == [0, 256, 0, 0]


def test_a_block_of_a_stack_stands_alone() -> None:
    layout = Layout.stack(F32, (1000,), 7, 3)
    alone = [layout.alone(index) for index in range(layout.blocks)]
    assert [one.members for one in alone] == [3, 3, 1]
    assert [(one.blocks, one.segment, one.word_index(0)) for one in alone] == [(1, 1000, 0)] * 3


def test_a_stack_of_scalars_is_one_block() -> None:
    layout = Layout.stack(BF16, (), 70_000, 70_000)
    assert (layout.blocks, layout.segment, layout.word) == (1, 1, 2)


def test_a_stack_of_one_is_the_tensor() -> None:
    assert Layout.stack(BF16, (3, 64), 1, 1) == Layout.of(BF16, (3, 64))
    assert Layout.stack(BF16, (1 << 20, 64), 1, 1) == Layout.of(BF16, (1 << 20, 64))


@pytest.mark.parametrize(("shape", "per"), [((0,), 1), ((BLOCK + 1,), 1), ((BLOCK // 2,), 3)])
def test_empty_and_large_tensors_are_not_stacked(shape: tuple[int, ...], per: int) -> None:
    with pytest.raises(ValueError, match="block of a stack"):
        Layout.stack(BF16, shape, 5, per)
