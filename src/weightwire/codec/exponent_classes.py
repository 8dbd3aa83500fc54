"""The class of a weight, and its place on the ordered integer line.

Part of the executable specification (docs/FORMAT.md, "Classes" and "Steps"). An update changes a weight only if it
crosses half an ulp, and the exponent sets the ulp. So the old exponent, which the receiver also has, predicts how
likely a weight is to change and by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.weights import Dtype

__all__ = ["CLASSES", "ZERO_CLASS", "Window", "choose_window", "classes_of", "order", "unorder"]

Units = npt.NDArray[np.unsignedinteger]

CLASSES = 16
ZERO_CLASS = CLASSES - 1  # exponent field 0 (zeros and denormals), and all units that are not floats

_STRETCH = 1024
_STRETCHES = 64
_ENOUGH = 256
_RARE = 128


@dataclass(frozen=True)
class Window:
    """Class 0 holds exponents >= top, class `width` - 1 those <= top - width + 1, each class between holds one."""

    top: int
    width: int


def _exponents(units: Units, dtype: Dtype) -> npt.NDArray[np.int64]:
    if not dtype.is_float:
        return np.zeros(len(units), np.int64)
    shifted = units >> units.dtype.type(dtype.mantissa)
    return (shifted & units.dtype.type((1 << dtype.exponent) - 1)).astype(np.int64)


def classes_of(units: Units, dtype: Dtype, window: Window) -> npt.NDArray[np.uint8]:
    exponents = _exponents(units, dtype)
    classes = np.clip(window.top - exponents, 0, window.width - 1)
    return np.where(exponents == 0, ZERO_CLASS, classes).astype(np.uint8)


def choose_window(old: Units, new: Units, dtype: Dtype) -> Window:
    """The window for a block, from the exponents of a sample of its changes, or of all if there are few.

    The top class is above the largest frequent exponent, which separates weights that are too large to change. Rare low
    exponents share the bottom class.
    """
    starts = [0]
    length = len(old)
    if length > _STRETCH * _STRETCHES:
        starts = [i * (length - _STRETCH) // (_STRETCHES - 1) for i in range(_STRETCHES)]
        length = _STRETCH
    counts = np.zeros(1 << dtype.exponent, np.int64)
    for start in starts:
        counts += _changed_exponents(old[start : start + length], new[start : start + length], dtype)
    seen = length * len(starts)
    if counts.sum() < _ENOUGH and seen < len(old):
        counts = _changed_exponents(old, new, dtype)
        seen = len(old)
    counts[0] = 0  # ZERO_CLASS
    return _window_around(counts.tolist(), seen, len(old))


def _changed_exponents(old: Units, new: Units, dtype: Dtype) -> npt.NDArray[np.int64]:
    return np.bincount(_exponents(old[old != new], dtype), minlength=1 << dtype.exponent)


def _window_around(counts: list[int], seen: int, length: int) -> Window:
    total = sum(counts)
    if total == 0:
        return Window(top=0, width=1)
    high, above = len(counts) - 1, 0
    while (above + counts[high]) * _ENOUGH <= total:
        above += counts[high]
        high -= 1
    low, below = 1, 0
    while low < high and (below + counts[low]) * length < _RARE * seen and 16 * (below + counts[low]) < total:
        below += counts[low]
        low += 1
    top = min(high + 1, len(counts) - 1)
    return Window(top, min(top - low + 1, CLASSES - 1))


def order(units: Units, dtype: Dtype) -> Units:
    """Maps bits to unsigned integers that sort like the values. Flips the sign bit, and all bits of negative values."""
    if not dtype.is_float:
        return units
    sign = units.dtype.type(1 << (8 * units.itemsize - 1))
    return np.where(units & sign, ~units, units | sign)


def unorder(ordered: Units, dtype: Dtype) -> Units:
    if not dtype.is_float:
        return ordered
    sign = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return np.where(ordered & sign, ordered ^ sign, ~ordered)
