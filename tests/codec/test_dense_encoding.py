"""The `dense` encoding: its cost, and malformed blocks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from support.crafted_files import Dense, DenseTable, Marks, parse_dense
from support.encoded import encode_dense, encode_ulp
from support.samples import BASES, LAYOUTS, Units, base, below, change
from weightwire.codec import _kernel, numpy_kernel
from weightwire.codec.encodings import decode_block
from weightwire.codec.exponent_classes import classes_of, order, unorder
from weightwire.weights.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]


@pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", BASES)
def test_blocks_round_trip(dtype: Dtype, kind: str) -> None:
    """Even if another encoding would be shorter."""
    old = base(dtype, 640, kind)
    for how in ("one", "half", "all", "signs", "rows"):
        for line in (0, 64):
            new = change(old, dtype, how, line=line)
            assert (
                decode_block(memoryview(encode_dense(old, new, dtype, line)), old, 640, dtype, line)[1].tobytes()
                == new.tobytes()
            )


def drifted(old: Units, seed: int, most: int) -> Units:
    """Every weight moves by up to `most` steps: the smaller its exponent, the further."""
    room = np.maximum(1, most >> np.maximum(0, (old >> np.uint16(7) & np.uint16(0xFF)).astype(int) - 110))
    steps = below(seed, len(old), 1 << 30) % (2 * room + 1) - room
    return unorder(order(old, BF16) + steps.astype("<u2"), BF16)


def test_classes_bring_the_cost_down_to_the_conditional_entropy() -> None:
    old = base(BF16, 1 << 17)
    new = drifted(old, 1, 12)
    steps = (order(new, BF16) - order(old, BF16)).view(np.int16)
    exponents = old >> np.uint16(7) & np.uint16(0xFF)
    bits = sum(entropy(np.unique(steps[exponents == e], return_counts=True)[1]) for e in np.unique(exponents))
    assert 8 * len(encode_dense(old, new, BF16, 0)) < 1.01 * bits


def entropy(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    total = int(counts.sum())
    return -sum(n * math.log2(n / total) for n in counts.tolist())


def test_it_is_as_short_as_listing_the_changes() -> None:
    old = base(BF16, 1 << 17)
    for every in (2, 8):
        new = np.where(np.arange(len(old)) % every, old, drifted(old, 2, 40)).astype("<u2")
        assert len(encode_dense(old, new, BF16, 0)) < 1.01 * len(encode_ulp(old, new, BF16, 0))


def test_a_class_without_a_change_costs_nothing() -> None:
    still = np.full(20_000, 125 << 7, "<u2")
    moving = np.full(4000, 115 << 7, "<u2")
    moved = moving + (np.arange(4000) % 3).astype("<u2")
    alone = encode_dense(moving, moved, BF16, 0)
    both = encode_dense(np.concatenate([still, moving]), np.concatenate([still, moved]), BF16, 0)
    assert len(both) <= len(alone) + 16  # four lanes instead of one


def test_lines_without_a_change_are_left_out() -> None:
    old = base(BF16, 640 * 128)
    new = old.reshape(-1, 128).copy()
    new[::3] = drifted(new[::3].ravel(), 3, 12).reshape(-1, 128)
    with_lines, without = (encode_dense(old, new.ravel(), BF16, line) for line in (128, 0))
    assert with_lines[0] & 16
    assert len(with_lines) < 0.9 * len(without)


def test_steps_wrap_around() -> None:
    """From the least number to the greatest is one step down."""
    old, new = np.array([0xFFFF, 0x3F80], "<u2"), np.array([0x7FFF, 0x3F80], "<u2")
    data = encode_dense(old, new, BF16, 0)
    assert parse_dense(data, old, BF16, 0).symbols == [2, 0]
    assert (decode_block(memoryview(data), old, 2, BF16, 0)[1] == new).all()


# Malformed blocks, each with one error


OLD = np.repeat(np.array([117, 119, 117, 119, 0] * 4, "<u2") << np.uint16(7), 64)  # twenty lines of 64
STEPS = np.arange(1280) % np.where(np.arange(1280) // 64 % 5, 4, 40)
NEW = np.where(np.arange(1280) // 64 % 5 < 2, OLD + STEPS.astype("<u2"), OLD).astype("<u2")


def honest() -> Dense:
    """A block with lines, two classes, and steps with raw bits."""
    return parse_dense(encode_dense(OLD, NEW, BF16, 64), OLD, BF16, 64)


def test_the_valid_block_is_accepted() -> None:
    block = honest()
    assert block.lines
    assert len(block.tables) == 2
    assert block.low
    assert block.build() == encode_dense(OLD, NEW, BF16, 64)
    for one in (numpy_kernel, _kernel):
        assert one.decode_block(block.build(), OLD, len(OLD), 2, 8, 7, 64) == (None, bytearray(NEW.tobytes()))


def lines(block: Dense) -> Marks:
    assert block.lines
    return block.lines


def too_many_classes(block: Dense) -> None:
    block.bounds = list(range(200, 185, -1))


def no_class(block: Dense) -> None:
    block.present, block.tables, block.low = set(), [], []
    block.symbols = [0] * len(block.symbols)


def a_class_without_a_change(block: Dense) -> None:
    block.tables[0] = DenseTable((40,), 256)
    block.symbols, block.low = [0] * len(block.symbols), []


def too_many_levels(block: Dense) -> None:
    block.tables[0].levels = (40,) * 65


def levels_without_a_top(block: Dense) -> None:
    block.tables[0].levels = tuple(min(39, level) for level in block.tables[0].levels)


def a_bias_of_0(block: Dense) -> None:
    for table in block.tables:
        table.plus = 0
    block.symbols = [symbol + symbol % 2 for symbol in block.symbols]  # all negative


def a_unit_too_few(block: Dense) -> None:
    block.symbols.pop()


def a_raw_number_too_few(block: Dense) -> None:
    del block.low[-4:]


def a_raw_number_too_many(block: Dense) -> None:
    block.low.append((1, 9))


def a_line_past_the_last(block: Dense) -> None:
    lines(block).symbols[-1] += 4


def more_lines_than_there_are(block: Dense) -> None:
    lines(block).claimed = 21


def a_gap_without_end(block: Dense) -> None:
    lines(block).symbols[-1] = len(lines(block).table) - 1


def a_byte_too_many(block: Dense) -> None:
    block.tail = b"\0"


def a_byte_that_is_not_zero(block: Dense) -> None:
    block.tail = b"\1"


def one_word_claimed(block: Dense) -> None:
    block.words = 1


def an_unknown_tag(block: Dense) -> None:
    block.tag |= 32


def unknown_lanes(block: Dense) -> None:
    block.tag |= 12


LIES: list[Callable[[Dense], None]] = [
    too_many_classes, no_class, a_class_without_a_change, too_many_levels, levels_without_a_top, a_bias_of_0,
    a_unit_too_few, a_raw_number_too_few, a_raw_number_too_many, a_line_past_the_last, more_lines_than_there_are,
    a_gap_without_end, a_byte_too_many, a_byte_that_is_not_zero, one_word_claimed, an_unknown_tag, unknown_lanes,
]  # fmt: skip


def rejected(data: bytes, old: Units | None = OLD, line: int = 64) -> list[str]:
    """The reasons of NumPy and of the kernel."""
    reasons = []
    for one in (numpy_kernel, _kernel):
        with pytest.raises(ValueError, match=r"\w") as caught:
            one.decode_block(data, old, len(OLD), 2, 8, 7, line)
        reasons.append(str(caught.value))
    return reasons


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_malformed_blocks_are_rejected_by_both_kernels(lie: Callable[[Dense], None]) -> None:
    block = honest()
    lie(block)
    rejected(block.build())


def test_a_block_for_other_weights_is_rejected() -> None:
    """Its classes choose the tables, so the coder ends in another state."""
    rejected(honest().build(), np.roll(OLD, 64))


def test_lines_in_a_layout_without_lines_are_rejected() -> None:
    assert rejected(honest().build(), line=0) == ["it lists lines where there are none"] * 2


def test_a_block_needs_its_base() -> None:
    assert rejected(honest().build(), None) == ["it needs a base"] * 2


@pytest.mark.parametrize("size", range(1, 200, 7))
def test_a_truncated_block_is_rejected(size: int) -> None:
    data = honest().build()
    assert len(data) > 200
    rejected(data[:size])
    rejected(data[:-1])


def test_the_units_of_a_class_have_its_table() -> None:
    """Also if the base has more exponents than the block has classes."""
    old = base(BF16, 5000, "bits")
    block = parse_dense(encode_dense(old, change(old, BF16, "half"), BF16, 0), old, BF16, 0)
    assert block.classes == classes_of(old, BF16, tuple(block.bounds)).tolist()
