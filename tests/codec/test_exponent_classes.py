"""Exponent classes, how they are chosen, and the ordered integer line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from support.samples import LAYOUTS, base, special, units_of
from weightwire.codec.exponent_classes import ZERO_CLASS, Bounds, choose_classes, classes_of, order, unorder
from weightwire.weights.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]


@pytest.mark.parametrize("dtype", LAYOUTS, ids=lambda dtype: dtype.name)
def test_unorder_reverses_order(dtype: Dtype) -> None:
    units = np.arange(256, dtype=np.uint8) if dtype.unit == 1 else base(dtype, 1000, "bits")
    units = np.concatenate([units, units_of(special(dtype), dtype)])
    assert (unorder(order(units, dtype), dtype) == units).all()


@pytest.mark.parametrize(
    ("name", "array_dtype"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F16", np.float16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
    ],
)
def test_floats_are_in_the_order_of_their_values(name: str, array_dtype: type) -> None:
    dtype = DTYPES[name]
    units = np.arange(1 << (8 * dtype.unit), dtype=np.uint64).astype(f"<u{dtype.unit}")
    with np.errstate(invalid="ignore"):  # NaNs that signal
        line = unorder(units, dtype).view(array_dtype).astype(np.float64)
    numbers = line[~np.isnan(line)]
    assert (np.diff(numbers) >= 0).all()
    assert len(np.unique(line)) >= len(numbers) - 1  # only the two zeros are equal


def test_neighbours_on_the_line_are_one_ulp_apart() -> None:
    """Across the zeros: from the least negative number over -0 and +0 to the least positive."""
    around_zero = np.array([0x8001, 0x8000, 0x0000, 0x0001], np.uint16)
    assert np.diff(order(around_zero, BF16).astype(int)).tolist() == [1, 1, 1]


def test_integers_keep_their_order() -> None:
    units = np.arange(256, dtype=np.uint8)
    assert order(units, DTYPES["I8"]) is units


def test_a_class_is_the_number_of_bounds_above_the_exponent() -> None:
    exponents = [0, 1, 99, 100, 119, 120, 121, 255]
    units = np.array([e << 7 | 5 for e in exponents], np.uint16)
    assert classes_of(units, BF16, (120, 100)).tolist() == [ZERO_CLASS, 2, 2, 1, 1, 0, 0, 0]


def test_classes_ignore_the_sign() -> None:
    units = base(BF16, 1000)
    bounds = tuple(range(126, 112, -1))
    assert (classes_of(units, BF16, bounds) == classes_of(units | np.uint16(0x8000), BF16, bounds)).all()


def test_integers_have_one_class() -> None:
    units = base(DTYPES["I32"], 100, "bits")
    bounds = choose_classes(units, ~units, DTYPES["I32"]).bounds
    assert bounds == ()
    assert (classes_of(units, DTYPES["I32"], bounds) == ZERO_CLASS).all()


def bounds_of(rates: dict[int, float], each: int = 4000, copies: int = 1) -> Bounds:
    """The classes of a block in which each exponent changes at this rate."""
    old = np.tile(np.repeat(np.array(list(rates), np.uint16) << 7, each), copies)
    at = np.arange(len(old)) * 7919 % each
    changed = at < np.tile(np.repeat(np.array(list(rates.values())) * each, each), copies)
    return choose_classes(old, np.where(changed, old + np.uint16(1), old).astype(np.uint16), BF16).bounds


def test_exponents_that_change_alike_share_a_class() -> None:
    assert bounds_of({120: 0.3, 119: 0.3, 118: 0.3}) == ()
    assert bounds_of({120: 0.01, 119: 0.01, 118: 0.4, 117: 0.4}) == (119,)


def test_exponents_that_change_at_different_rates_are_classes() -> None:
    assert bounds_of({120: 0.01, 119: 0.1, 118: 0.4, 117: 0.9}) == (120, 119, 118)


def test_exponents_with_other_steps_are_classes() -> None:
    old = np.repeat(np.array([120, 118], np.uint16) << 7, 4000)
    steps = np.where(np.arange(8000) % 4, 0, np.where(np.arange(8000) < 4000, 1, 2)).astype(np.uint16)
    assert choose_classes(old, old + steps, BF16).bounds == (119,)


def test_there_are_at_most_15_classes() -> None:
    assert 10 < len(bounds_of({130 - i: 0.9 * 0.8**i for i in range(30)})) <= 14


def test_missing_exponents_are_in_the_class_above() -> None:
    assert bounds_of({200: 0.01, 118: 0.5}) == (119,)


def test_a_class_must_pay_for_its_head() -> None:
    assert bounds_of({120: 0.1, 118: 0.2}, each=40) == ()
    assert bounds_of({120: 0.1, 118: 0.2}, each=4000) == (119,)


def test_blocks_may_hold_only_the_top_exponent_or_only_denormals() -> None:
    assert bounds_of({255: 0.5}) == ()
    assert bounds_of({0: 0.5}) == ()


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.01), (0.0004, 0.002)])
def test_a_large_block_is_sampled_unless_it_has_few_changes(low: float, high: float) -> None:
    assert bounds_of({120: low, 118: high}, copies=25) == (119,)


def test_changes_outside_the_sample_count_if_they_are_few() -> None:
    old = np.repeat(np.array([120, 118], np.uint16) << 7, 150_000)
    new = old.copy()
    new[1030:2000] += 1  # between the first two stretches
    assert choose_classes(old, new, BF16).bounds == (119,)


@pytest.mark.parametrize(("changed", "is_dense"), [(125, False), (126, True)])
def test_a_block_of_which_more_than_an_eighth_changes_is_dense(changed: int, is_dense: bool) -> None:
    old = base(BF16, 1000)
    new = old.copy()
    new[:changed] += np.uint16(1)
    assert choose_classes(old, new, BF16).is_dense is is_dense


def test_the_sample_tells_whether_a_large_block_is_dense() -> None:
    """128 stretches of 1024 units are seen: here all units but these change."""
    count = 1 << 20
    old = base(BF16, count, "equal")
    new = old + np.uint16(1)
    assert choose_classes(old, new, BF16).is_dense
    for i in range(128):
        start = i * (count - 1024) // 127
        new[start : start + 1024] = old[start : start + 1024]
    assert not choose_classes(old, new, BF16).is_dense
