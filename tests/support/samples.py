"""Weights and changes for tests, of every dtype and kind.

Uses integer arithmetic and its own generator: the same on every machine and with every NumPy, as golden files need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire.codec import _kernel
from weightwire.codec.block_layout import Layout
from weightwire.weights.dtypes import DTYPES, Dtype

Units = npt.NDArray[np.unsignedinteger[Any]]

BASES = ("weights", "bits", "equal", "zeros", "special")
CHANGES = ("one", "few", "likely", "half", "most", "all", "signs", "huge", "rows", "down", "mostly-up")

# One dtype for each layout of units in the kernel.
LAYOUTS = tuple(DTYPES[name] for name in ("U8", "U16", "U32", "U64", "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))


def words(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Splitmix64: `count` words of 64 random bits."""
    z = np.uint64(seed * 0xD1342543DE82EF95 % 2**64) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def below(seed: int, count: int, limit: int) -> npt.NDArray[np.int64]:
    """`count` random numbers from 0 to before `limit`."""
    return ((words(seed, count) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


def unit_dtype(dtype: Dtype) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"<u{dtype.unit}")


def units_of(values: npt.NDArray[np.uint64] | list[int], dtype: Dtype) -> Units:
    """The low bits of numbers, as units of a dtype."""
    return np.array(values, np.uint64).astype(unit_dtype(dtype))


# --- bases -------------------------------------------------------------------------------------------------------


def base(dtype: Dtype, count: int, kind: str = "weights", seed: int = 1) -> Units:
    """Units of a dtype, of one of the kinds in BASES."""
    random = words(seed, count)
    if kind == "weights":
        return weights(dtype, random)
    if kind == "special":
        return units_of(special(dtype), dtype)[below(seed, count, len(special(dtype)))]
    if kind == "equal":
        return np.full(count, weights(dtype, words(seed, 1))[0])
    return units_of(random if kind == "bits" else np.zeros(count, np.uint64), dtype)


def weights(dtype: Dtype, random: npt.NDArray[np.uint64]) -> Units:
    """Floats spread over -1 to 1, or small integers."""
    if not dtype.is_float:
        return units_of((random >> np.uint64(20)) % np.uint64(200) - np.uint64(100), dtype)
    low = random & np.uint64(0xFFFFF) | np.uint64(0x100000)
    zeros = np.bitwise_count((low & (~low + np.uint64(1))) - np.uint64(1)).astype(np.int64)
    exponents = np.maximum((1 << (dtype.exponent - 1)) - 2 - zeros, 0).astype(np.uint64)
    mantissas = (random >> np.uint64(20)) % np.uint64(1 << min(dtype.mantissa, 40)) << np.uint64(
        max(0, dtype.mantissa - 40)
    )
    signs = random >> np.uint64(63) << np.uint64(8 * dtype.unit - 1)
    return units_of(signs | exponents << np.uint64(dtype.mantissa) | mantissas, dtype)


def special(dtype: Dtype) -> list[int]:
    """Both zeros, the denormals at both ends, the least normal, the largest, infinities and NaNs of many payloads."""
    width = 8 * dtype.unit
    sign = 1 << (width - 1)
    if not dtype.is_float:
        return [0, 1, 2, sign - 1, sign, sign + 1, 2 * sign - 1]
    least = 1 << dtype.mantissa
    infinity = ((1 << dtype.exponent) - 1) << dtype.mantissa
    positive = [
        0,
        1,
        least - 1,
        least,
        least + 1,
        infinity - 1,
        infinity,
        infinity + 1,
        infinity + least // 2,
        sign - 1,
    ]
    return positive + [x | sign for x in positive]


# --- changes -----------------------------------------------------------------------------------------------------


def change(old: Units, dtype: Dtype, kind: str = "few", seed: int = 2, line: int = 0) -> Units:
    """A base after a change of one of the kinds in CHANGES. At least one unit differs."""
    count = len(old)
    random = units_of(words(seed, count), dtype)
    chosen, step = _chosen(old, dtype, kind, seed, line), _step(old, dtype, kind, seed)
    new = np.where(chosen, old + step, old)
    if kind in ("all", "huge"):
        new = np.where(chosen, random, old)
        new = np.where(chosen & (new == old), ~old, new)
    if kind == "signs":
        new = np.where(chosen, old ^ units_of([1 << (8 * dtype.unit - 1)], dtype), old)
    if count and not (new != old).any():
        new[count // 2] ^= new.dtype.type(1)
    return new.astype(unit_dtype(dtype))


def _chosen(old: Units, dtype: Dtype, kind: str, seed: int, line: int) -> npt.NDArray[np.bool_]:
    """Which units change."""
    count = len(old)
    chance = below(seed + 1000, count, 1024)
    if kind == "likely":  # the smaller a weight, the likelier it changes
        exponents = (old.astype(np.uint64) >> np.uint64(dtype.mantissa)) & np.uint64((1 << dtype.exponent) - 1)
        smaller = (1 << dtype.exponent) // 2 - exponents.astype(np.int64)
        return chance < np.left_shift(4, np.clip(smaller, 0, 8))
    if kind == "rows":
        length = line or 64
        active = below(seed + 2000, -(-count // length), 8) == 0
        return np.repeat(active, length)[:count] & (chance < 200)
    rates = {"one": 0, "few": 10, "huge": 20, "down": 51, "signs": 128, "mostly-up": 200, "half": 512, "most": 960}
    return chance < rates.get(kind, 1024)


def _step(old: Units, dtype: Dtype, kind: str, seed: int) -> Units:
    """Steps by one, sometimes by more."""
    random = below(seed + 3000, len(old), 64)
    size = np.where(random < 56, 1, random - 54)
    negative = (old >> old.dtype.type(8 * dtype.unit - 1) == 1) & dtype.is_float
    down = below(seed + 4000, len(old), 2) == 0
    if kind == "down":
        down = ~negative
    elif kind == "mostly-up":
        down = negative ^ (below(seed + 4000, len(old), 6) == 0)
    return units_of(np.where(down, -size, size).view(np.uint64), dtype)


# --- blocks ------------------------------------------------------------------------------------------------------


def words_of(dtype: Dtype, count: int) -> tuple[int, ...]:
    """The word widths with which this many units can be digested."""
    return (dtype.unit, 8) if dtype.unit < 8 and count * dtype.unit % 8 == 0 else (dtype.unit,)


def lines_of(dtype: Dtype, count: int) -> tuple[int, ...]:
    """Line lengths for a block of this many units: 0, the shortest, and one that is not a multiple of 64."""
    return (0, *(line for line in (64, 72, 1000) if count % line == 0 and count and line * dtype.unit % 8 == 0))


def flat(dtype: Dtype, count: int) -> Layout:
    """The layout of a tensor of one dimension."""
    return Layout.of(dtype, (count * 8 * dtype.unit // dtype.bits,))


# --- the kernel --------------------------------------------------------------------------------------------------


def vector_widths() -> tuple[int, ...]:
    """The vector widths that the kernel supports on this machine."""
    widths = tuple(dict.fromkeys(_kernel.vectors(most) for most in (512, 256, 0)))
    _kernel.vectors(512)
    return widths


@contextmanager
def vectors_of(width: int) -> Iterator[None]:
    """Uses vectors of this width in the kernel, and the widest afterwards."""
    assert _kernel.vectors(width) == width
    try:
        yield
    finally:
        _kernel.vectors(512)


def whole_digest(kernel: Any, data: Any, word: int, start: int) -> tuple[int, int]:
    """The digest of all words, as of one segment."""
    return pair(kernel.digest(data, word, max(1, memoryview(data).nbytes // word), word, start) or bytes(16))


def pair(digests: bytes) -> tuple[int, int]:
    """The sums of the only segment."""
    assert len(digests) == 16
    return int.from_bytes(digests[:8], "little"), int.from_bytes(digests[8:], "little")
