"""The class of a weight, and its place on the ordered integer line.

Part of the executable specification (docs/FORMAT.md, "Classes" and "Steps"). An update changes a weight only if it
crosses half an ulp, and the exponent sets the ulp. So the old exponent, which the receiver also has, predicts how
likely a weight is to change and by how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter
from weightwire.codec.frequency_tables import entropy_of
from weightwire.weights import Dtype

__all__ = [
    "CLASSES",
    "ZERO_CLASS",
    "Bounds",
    "Choice",
    "Units",
    "choose_classes",
    "classes_of",
    "order",
    "read_classes",
    "unorder",
    "write_classes",
]

Units = npt.NDArray[np.unsignedinteger]
Bounds = tuple[int, ...]  # strictly descending exponents: a unit's class is the number of bounds above its exponent

CLASSES = 16
ZERO_CLASS = CLASSES - 1  # exponent field 0 (zeros and denormals), and all units that are not floats

_STRETCH = 1024
_STRETCHES = 128
_ENOUGH = 256
_HEAD = 24  # bits that a class costs
_NOISE = 4  # bits by which a sample flatters a class
_MANY = 8  # a block is dense if more than one of so many units changes
_KINDS = 32  # of steps: magnitudes up to 16, and both signs


def _exponents(units: Units, dtype: Dtype) -> npt.NDArray[np.int64]:
    if not dtype.is_float:
        return np.zeros(len(units), np.int64)
    shifted = units >> units.dtype.type(dtype.mantissa)
    return (shifted & units.dtype.type((1 << dtype.exponent) - 1)).astype(np.int64)


def classes_of(units: Units, dtype: Dtype, bounds: Bounds) -> npt.NDArray[np.uint8]:
    exponents = _exponents(units, dtype)
    above = len(bounds) - np.searchsorted(np.array(bounds[::-1], np.int64), exponents, "right")
    return np.where(exponents == 0, ZERO_CLASS, above).astype(np.uint8)


def _step_kinds(old: Units, new: Units, dtype: Dtype) -> npt.NDArray[np.int64]:
    """The kind of each step: magnitudes of 16 and more are one kind."""
    steps = (order(new, dtype) - order(old, dtype)).view(old.dtype.str.replace("u", "i")).astype(np.int64)
    magnitudes = np.where(steps < 0, -steps, steps).view(np.uint64)
    kinds: npt.NDArray[np.int64] = np.minimum(magnitudes - np.uint64(1), 15).astype(np.int64) * 2 + (steps < 0)
    return kinds


@dataclass
class _Counts:
    """The units of each exponent, those that changed, and the kinds of their steps."""

    units: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    @staticmethod
    def of(exponents: int) -> _Counts:
        return _Counts(np.zeros(exponents, np.int64), np.zeros((exponents, _KINDS), np.int64))

    def add(self, old: Units, new: Units, dtype: Dtype) -> None:
        self.units += np.bincount(_exponents(old, dtype), minlength=len(self.units))
        changed = old != new
        where = _exponents(old[changed], dtype), _step_kinds(old[changed], new[changed], dtype)
        np.add.at(self.steps, where, 1)


@dataclass(frozen=True)
class Choice:
    """How to encode a block, from a sample: its classes, and whether many of its units change."""

    bounds: Bounds
    is_dense: bool


def choose_classes(old: Units, new: Units, dtype: Dtype) -> Choice:
    """Exponents that change alike share a class.

    If the sample has few changes, all changes of the block count, and the sample only tells how many units there are.
    """
    length, seen = len(old), min(len(old), _STRETCH * _STRETCHES)
    counts = _Counts.of(1 << dtype.exponent)
    if seen == length:
        counts.add(old, new, dtype)
    else:
        for i in range(_STRETCHES):
            start = i * (length - _STRETCH) // (_STRETCHES - 1)
            counts.add(old[start : start + _STRETCH], new[start : start + _STRETCH], dtype)
    penalty, changed = _HEAD << 24, int(counts.steps.sum())
    if seen < length and changed < _ENOUGH:
        everything = _Counts.of(1 << dtype.exponent)
        everything.add(old, new, dtype)
        counts.steps = everything.steps
        counts.units = np.maximum(counts.units * length // seen, counts.steps.sum(axis=1))
    elif seen < length:
        penalty = (penalty * seen // length) + (_NOISE << 24)
    return Choice(_merge(counts, penalty), _MANY * changed > seen)


@dataclass
class _Group:
    """Neighbouring exponents, and what their marks and steps cost as a class of their own."""

    high: int
    units: int
    steps: list[int]
    cost: int


def _group(high: int, units: int, steps: list[int], penalty: int) -> _Group:
    changed = sum(steps)
    cost = entropy_of([changed, units - changed]) + entropy_of(steps) + penalty if changed else 0
    return _Group(high, units, steps, cost)


def _merge(counts: _Counts, penalty: int) -> Bounds:
    """Starts with a class for each exponent. Merges the two neighbours that lose least until all merges lose."""

    def both(a: _Group, b: _Group) -> _Group:
        return _group(a.high, a.units + b.units, [x + y for x, y in zip(a.steps, b.steps, strict=True)], penalty)

    units, steps = counts.units.tolist(), counts.steps.tolist()
    groups = [_group(e, units[e], steps[e], penalty) for e in range(len(units) - 1, 0, -1) if units[e]]
    merged = [both(a, b) for a, b in itertools.pairwise(groups)]
    losses = [m.cost - a.cost - b.cost for m, (a, b) in zip(merged, itertools.pairwise(groups), strict=True)]
    while losses and (min(losses) <= 0 or len(groups) >= CLASSES):
        at = losses.index(min(losses))
        groups[at : at + 2] = [merged[at]]
        del merged[at], losses[at]
        for i in range(max(0, at - 1), min(at + 1, len(merged))):
            merged[i] = both(groups[i], groups[i + 1])
            losses[i] = merged[i].cost - groups[i].cost - groups[i + 1].cost
    return tuple(group.high + 1 for group in groups[1:])


def write_classes(bits: BitWriter, bounds: Bounds, present: Sequence[int], dtype: Dtype) -> None:
    """The bounds, and which classes have a change."""
    bits.number(len(bounds), 4)
    for i, bound in enumerate(bounds):
        if i == 0:
            bits.number(bound, dtype.exponent)
        else:
            bits.golomb(bounds[i - 1] - bound - 1, 0)
    for c in (*range(len(bounds) + 1), ZERO_CLASS):
        bits.number(c in present, 1)


def read_classes(bits: BitReader, dtype: Dtype) -> tuple[Bounds, list[int]]:
    count = bits.number(4)
    if count > (CLASSES - 2 if dtype.exponent else 0):
        raise ValueError("it has too many classes")
    bounds: list[int] = []
    for _ in range(count):
        bounds.append(bounds[-1] - bits.golomb(0) - 1 if bounds else bits.number(dtype.exponent))
        if bounds[-1] < 1:
            raise ValueError("a class is out of range")
    present = [c for c in (*range(count + 1), ZERO_CLASS) if bits.number(1)]
    if not present:
        raise ValueError("it changes nothing")
    return tuple(bounds), present


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
