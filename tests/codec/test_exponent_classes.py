"""Exponent classes, windows, and the ordered integer line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from support.samples import LAYOUTS, base, change, special, units_of
from weightwire.codec.exponent_classes import ZERO_CLASS, Window, choose_window, classes_of, order, unorder
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


def test_classes_go_down_from_the_top_of_the_window() -> None:
    exponents = [0, 1, 100, 118, 119, 120, 121, 255]
    units = np.array([e << 7 | 5 for e in exponents], np.uint16)
    assert classes_of(units, BF16, Window(120, 3)).tolist() == [ZERO_CLASS, 2, 2, 2, 1, 0, 0, 0]


def test_classes_ignore_the_sign() -> None:
    units = base(BF16, 1000)
    window = Window(124, 15)
    assert (classes_of(units, BF16, window) == classes_of(units | np.uint16(0x8000), BF16, window)).all()


def test_integers_have_one_class() -> None:
    units = base(DTYPES["I32"], 100, "bits")
    window = choose_window(units, ~units, DTYPES["I32"])
    assert window == Window(0, 1)
    assert (classes_of(units, DTYPES["I32"], window) == ZERO_CLASS).all()


def window_of(counts: dict[int, int], length: int = 10_000) -> Window:
    """The window for a block with these counts of changes per exponent."""
    old = np.zeros(length, np.uint16)
    at = 0
    for exponent, count in counts.items():
        old[at : at + count] = exponent << 7
        at += count
    new = old.copy()
    new[:at] += 1
    return choose_window(old, new, BF16)


def test_a_window_is_one_above_the_exponents_that_change() -> None:
    assert window_of({118: 900, 117: 900, 116: 900}) == Window(119, 4)


def test_a_window_has_at_most_15_classes() -> None:
    assert window_of(dict.fromkeys(range(100, 130), 200)) == Window(130, 15)


def test_a_few_outliers_do_not_move_the_window() -> None:
    assert window_of({200: 3, 118: 900, 117: 900}) == Window(119, 3)


def test_rare_small_exponents_share_the_bottom_class() -> None:
    assert window_of({118: 2000, 117: 2000, 100: 50, 90: 50}).top == 119
    assert window_of({118: 2000, 117: 2000, 100: 50, 90: 50}).width == 3


def test_windows_may_hold_only_the_top_exponent_or_only_denormals() -> None:
    assert window_of({255: 1000}) == Window(255, 1)
    assert window_of({0: 1000}) == Window(0, 1)


def test_a_large_block_is_sampled_unless_it_has_few_changes() -> None:
    old = np.full(300_000, 118 << 7, np.uint16)
    quiet = old.copy()
    quiet[150_001] += 1  # in none of the 64 stretches
    assert choose_window(old, quiet, BF16) == Window(119, 2)
    assert choose_window(old, change(old, BF16, "half"), BF16) == Window(119, 2)
