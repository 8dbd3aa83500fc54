"""The `ulp` encoding: its bytes, its cost, and malformed blocks."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable

import numpy as np
import pytest

from support.crafted_files import Marks, Steps, Ulp, parse_ulp
from support.encoded import encode_ulp
from support.samples import LAYOUTS, Units, base, below, change
from weightwire.codec import _kernel, numpy_kernel
from weightwire.codec.encodings import decode_block
from weightwire.weights.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]


def step_by_one(old: Units, every: int) -> Units:
    new = old.copy()
    new[::every] += 1
    return new


@pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("how", ["one", "likely", "most", "all", "signs"])
def test_positions_and_values_round_trip(dtype: Dtype, how: str) -> None:
    """Even if another encoding would be shorter."""
    old = base(dtype, 500)
    new = change(old, dtype, how)
    positions, values = decode_block(memoryview(encode_ulp(old, new, dtype, 0)), old, len(old), dtype, 0)
    assert positions is not None
    assert positions.tolist() == np.flatnonzero(old != new).tolist()
    assert (values == new[old != new]).all()


def test_one_change_takes_a_dozen_bytes() -> None:
    old = base(BF16, 1 << 16)
    new = old.copy()
    new[12345] += 1
    assert len(encode_ulp(old, new, BF16, 0)) <= 20


def test_a_class_that_changes_completely_costs_only_its_steps() -> None:
    old = np.full(4096, 118 << 7, "<u2")
    block = parse_ulp(encode_ulp(old, old + np.uint16(1), BF16, 0), BF16)
    assert [(marks.complement, marks.symbols) for marks, _ in block.classes] == [(True, [])]
    assert len(block.build()) < 30  # sixteen of them states


def test_unchanged_positions_are_listed_if_most_changed() -> None:
    old = np.full(1000, 118 << 7, "<u2")
    new = old + np.uint16(1)
    new[[10, 500]] = old[[10, 500]]
    ((marks, steps),) = parse_ulp(encode_ulp(old, new, BF16, 0), BF16).classes
    assert marks.complement
    assert len(marks.low) == 2
    assert len(steps.symbols) == 998


def test_classes_with_other_steps_have_their_own_table() -> None:
    old = np.repeat(np.array([122, 120, 118], "<u2") << np.uint16(7), 4000)
    steps = np.where(np.arange(12_000) < 8000, 1, 3).astype("<u2")
    rates = np.repeat([30, 5, 2], 4000)
    new = np.where(np.arange(12_000) % rates == 0, old + steps, old).astype("<u2")
    classes = parse_ulp(encode_ulp(old, new, BF16, 0), BF16).classes
    assert [(steps.same, steps.levels) for _, steps in classes] == [
        (False, (40,)),
        (True, (40,)),
        (False, (0, 0, 40)),
    ]


def test_exponents_are_classes_by_their_rates() -> None:
    old = base(BF16, 20_000)
    block = parse_ulp(encode_ulp(old, change(old, BF16, "likely"), BF16, 0), BF16)
    assert len(block.present) == len(block.classes) > 5
    assert all(len(steps.symbols) == len(marks.low) for marks, steps in block.classes if not marks.complement)


def test_classes_bring_the_cost_down_to_the_conditional_entropy() -> None:
    """All changes are one step up, and their rate depends on the exponent: only positions cost bits."""
    old = base(BF16, 1 << 18) & np.uint16(0x7FFF)
    chosen = change(old, BF16, "likely") != old
    new = np.where(chosen, old + np.uint16(1), old).astype("<u2")
    exponents = old >> np.uint16(7) & np.uint16(0xFF)
    bits = sum(entropy(int((exponents == e).sum()), int((chosen & (exponents == e)).sum())) for e in range(256))
    assert 8 * len(encode_ulp(old, new, BF16, 0)) < 1.01 * bits


def entropy(members: int, marked: int) -> float:
    rest = members - marked
    return sum(n * math.log2(members / n) for n in (marked, rest) if n)


@pytest.mark.parametrize(
    ("how", "plus"),
    [("few", {128}), ("down", {-1}), ("mostly-up", {*range(129, 256)})],
    ids=["even", "down", "mostly up"],
)
def test_a_bias_of_signs_is_sent(how: str, plus: set[int]) -> None:
    old = base(BF16, 20_000, "equal")
    ((_, steps),) = parse_ulp(encode_ulp(old, change(old, BF16, how), BF16, 0), BF16).classes
    assert steps.plus in plus


def test_integers_are_seen_as_bytes() -> None:
    """Of eight packed numbers of 4 bits one changes, by one: that is all a step costs, whichever number it is."""
    old = base(DTYPES["I32"], 40_000, "bits") & np.uint32(0x77777777) | np.uint32(0x11111111)
    steps = np.uint32(1) << (4 * below(3, 40_000, 8)).astype(np.uint32)
    new = np.where(np.arange(40_000) % 16, old, old + steps)
    bits = 160_000 * (entropy(16, 1) / 16 / 4) + 2500 * 3  # which of the 32-bit units, and which number of it
    assert 8 * len(encode_ulp(old, new, DTYPES["I32"], 0)) < 1.02 * bits


@pytest.mark.parametrize("step", [1, 16, 127, 128, 129, 240, 255])
def test_every_step_of_a_byte_has_its_own_symbol(step: int) -> None:
    old = np.zeros(100, np.uint8)
    new = old.copy()
    new[7] = step
    ((_, steps),) = parse_ulp(encode_ulp(old, new, DTYPES["U8"], 0), DTYPES["U8"]).classes
    assert (steps.symbols, steps.low) == ([2 * step - 2 if step <= 128 else 2 * (256 - step) - 1], [])


def test_lines_are_listed_if_few_change() -> None:
    old = base(BF16, 640 * 128)
    quiet = change(old, BF16, "rows", line=128)
    with_lines, without = encode_ulp(old, quiet, BF16, 128), encode_ulp(old, quiet, BF16, 0)
    assert with_lines[0] & 16
    assert len(with_lines) < 0.8 * len(without)


def test_lines_are_not_listed_if_that_costs_more() -> None:
    old = base(BF16, 640 * 128)
    new = change(old, BF16, "few")
    assert encode_ulp(old, new, BF16, 128) == encode_ulp(old, new, BF16, 0)


def test_a_change_of_sign_is_an_ordinary_step() -> None:
    old = np.array([0x8000, 0x0000, 0x3F80], "<u2")
    new = np.array([0x0000, 0x8000, 0xBF80], "<u2")
    positions, values = decode_block(memoryview(encode_ulp(old, new, BF16, 0)), old, len(old), BF16, 0)
    assert positions is not None
    assert positions.tolist() == [0, 1, 2]
    assert values.tolist() == new.tolist()


# Malformed blocks, each with one error


OLD = np.repeat(np.array([117, 117, 117, 0, 119] * 4, "<u2") << np.uint16(7), 64)  # twenty lines of 64
NEW = np.where(np.arange(1280) // 64 % 5 == 1, step_by_one(OLD, 3), OLD).astype("<u2")
NEW[64 * 6 : 64 * 7] += 1


def honest() -> Ulp:
    """A block with lines, one class, and steps of one and two."""
    return parse_ulp(encode_ulp(OLD, NEW, BF16, 64), BF16)


def verdicts(data: bytes, old: Units = OLD, line: int = 64) -> list[str]:
    """The reasons of NumPy and of the kernel to reject a block."""
    reasons = []
    for one in (numpy_kernel, _kernel):
        with pytest.raises(ValueError, match=r"\w") as caught:
            one.decode_block(data, old, len(old), 2, 8, 7, line)
        reasons.append(str(caught.value))
    return reasons


def test_the_valid_block_is_accepted() -> None:
    block = honest()
    assert block.lines
    assert len(block.classes) == 1
    assert block.build() == encode_ulp(OLD, NEW, BF16, 64)
    for one in (numpy_kernel, _kernel):
        positions, values = one.decode_block(block.build(), OLD, len(OLD), 2, 8, 7, 64)
        assert positions == np.flatnonzero(OLD != NEW).astype("<u4").tobytes()
        assert values == NEW[OLD != NEW].tobytes()


def lines(block: Ulp) -> Marks:
    assert block.lines
    return block.lines


def too_many_classes(block: Ulp) -> None:
    block.bounds = list(range(200, 185, -1))


def a_class_below_the_exponents(block: Ulp) -> None:
    block.bounds = [10, 0]


def no_class(block: Ulp) -> None:
    block.present, block.classes = set(), []


def another_class(block: Ulp) -> None:
    """A class without members."""
    block.bounds, block.present = [255], {0}


def an_empty_class(block: Ulp) -> None:
    marks, steps = block.classes[0]
    marks.symbols, marks.low, steps.symbols = [], [], []


def a_mark_past_its_class(block: Ulp) -> None:
    block.classes[0][0].symbols[-1] += 5


def a_mark_past_everything(block: Ulp) -> None:
    marks, _ = block.classes[0]
    marks.j, marks.low = 127, [2**29 - 1] * len(marks.low)


def a_gap_of_2_to_the_32(block: Ulp) -> None:
    """It would be 0 in 32 bits."""
    marks, steps = block.classes[0]
    marks.j, marks.symbols, marks.low, steps.symbols = 127, [8], [0], steps.symbols[:1]


def more_marks_than_units(block: Ulp) -> None:
    block.classes[0][0].claimed = 1281


def a_gap_without_end(block: Ulp) -> None:
    block.classes[0][0].symbols[-1] = len(block.classes[0][0].table) - 1


def a_gap_parameter_past_the_last(block: Ulp) -> None:
    block.classes[0][0].j = 128


def a_gap_parameter_below_0(block: Ulp) -> None:
    block.classes[0][0].j = -1


def a_complement_that_is_none(block: Ulp) -> None:
    block.classes[0][0].complement = not block.classes[0][0].complement


def more_steps_than_changes(block: Ulp) -> None:
    block.classes[0][0].complement = True
    block.classes[0][1].claimed = 1000


def more_steps_than_units(block: Ulp) -> None:
    block.classes[0][0].complement = True
    block.classes[0][1].claimed = 1281


def a_step_too_few(block: Ulp) -> None:
    block.classes[0][1].symbols.pop()


def a_step_too_many(block: Ulp) -> None:
    block.classes[0][1].symbols.append(0)


def a_bias_of_0(block: Ulp) -> None:
    steps = block.classes[0][1]
    steps.plus, steps.symbols = 0, [symbol | 1 for symbol in steps.symbols]


def too_many_levels(block: Ulp) -> None:
    block.classes[0][1].levels = (40,) * 64


def levels_without_a_top(block: Ulp) -> None:
    block.classes[0][1].levels = (39, 30)


def a_line_past_the_last(block: Ulp) -> None:
    lines(block).symbols[-1] += 6


def more_lines_than_there_are(block: Ulp) -> None:
    lines(block).claimed = 21


def no_lines(block: Ulp) -> None:
    lines(block).symbols, lines(block).low = [], []


def a_byte_too_many(block: Ulp) -> None:
    block.tail = b"\0"


def a_bit_too_many(block: Ulp) -> None:
    block.tail = b"\1"


def a_word_too_few(block: Ulp) -> None:
    block.words = 1


def words_past_the_end(block: Ulp) -> None:
    block.words = 2**63


def an_unknown_tag(block: Ulp) -> None:
    block.tag |= 32


def unknown_lanes(block: Ulp) -> None:
    block.tag |= 12


def no_encoding(block: Ulp) -> None:
    block.tag &= ~3


LIES: list[Callable[[Ulp], None]] = [
    too_many_classes, a_class_below_the_exponents, no_class, another_class, an_empty_class,
    a_mark_past_its_class, a_mark_past_everything, a_gap_of_2_to_the_32, more_marks_than_units, a_gap_without_end,
    a_gap_parameter_past_the_last, a_gap_parameter_below_0, a_complement_that_is_none, more_steps_than_changes,
    more_steps_than_units, a_step_too_few, a_step_too_many, a_bias_of_0, too_many_levels, levels_without_a_top,
    a_line_past_the_last, more_lines_than_there_are, no_lines, a_byte_too_many, a_bit_too_many, a_word_too_few,
    words_past_the_end, an_unknown_tag, unknown_lanes, no_encoding,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_malformed_blocks_are_rejected_by_both_kernels(lie: Callable[[Ulp], None]) -> None:
    block = honest()
    lie(block)
    verdicts(block.build())


def test_claims_are_bounded_over_all_classes_together() -> None:
    """A certain step costs no bits, so sixteen classes could each claim all units for free."""
    count = 1 << 22
    old = np.zeros(count, "<u2")
    everything = Marks(True, 20, [], []), Steps([], [], (40,), 256, claimed=count)
    data = Ulp(1, 8, list(range(15, 1, -1)), set(range(16)), None, [everything] * 16).build()
    assert len(data) < 200
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert verdicts(data, old, 0) == ["it has more steps than weights"] * 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 150_000  # kB; NumPy takes some


def test_lines_in_a_layout_without_lines_are_rejected() -> None:
    assert verdicts(honest().build(), line=0) == ["it lists lines where there are none"] * 2


def test_a_block_needs_its_base() -> None:
    for one in (numpy_kernel, _kernel):
        with pytest.raises(ValueError, match="needs a base"):
            one.decode_block(honest().build(), None, len(OLD), 2, 8, 7, 64)


@pytest.mark.parametrize("size", range(1, 58, 2))
def test_a_truncated_block_is_rejected(size: int) -> None:
    data = honest().build()
    assert len(data) > 57
    verdicts(data[:size])
    verdicts(data[:-1])


def test_unusual_but_valid_blocks_are_accepted() -> None:
    """Four lanes for few symbols, all lines listed, or another number of lanes: longer, but valid."""
    block = honest()
    block.tag |= 4
    lines(block).symbols = [0] * 20
    lines(block).low = [0] * 20
    lines(block).j = 0
    accepted = block.build()
    # With every line active, ranks count other members. Both kernels must agree.
    results = [one.decode_block(accepted, OLD, len(OLD), 2, 8, 7, 64) for one in (numpy_kernel, _kernel)]
    assert results[0] == results[1]
