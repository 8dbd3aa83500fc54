"""The functions of the kernel in NumPy: the same names, arguments and results as the C extension `_kernel`.

The front door of the executable specification, and the fallback if the kernel was not built.
"""

from __future__ import annotations

import numpy as np

from weightwire.codec import encodings
from weightwire.codec.digest import Words, digest_words
from weightwire.codec.exponent_classes import Units
from weightwire.weights import Dtype

__all__ = ["decode_block", "digest", "digest_change", "encode_block", "patch_block", "replace_block", "swap_block"]

Buffer = bytes | bytearray | memoryview | Units


def encode_block(
    old: Buffer | None, new: Buffer, unit: int, exponent: int, mantissa: int, line: int, word: int, start: int
) -> tuple[bytes, int, int, int]:
    """The bytes of a block, the number of changed units, and the change of the digest."""
    dtype = Dtype("", 0, 8 * unit, exponent, mantissa)
    fresh = _units(new, unit)
    if old is None:
        return encodings.encode_block(None, fresh, dtype, line), len(fresh), 0, 0
    stale = _units(old, unit)
    changed = np.flatnonzero(fresh != stale)
    touched = np.unique(changed * unit // word)
    removed = digest_words(_words(old, word)[touched], touched.astype(np.uint64) + np.uint64(start))
    added = digest_words(_words(new, word)[touched], touched.astype(np.uint64) + np.uint64(start))
    return encodings.encode_block(stale, fresh, dtype, line), len(changed), *_less(added, removed)


def decode_block(
    data: Buffer, old: Buffer | None, count: int, unit: int, exponent: int, mantissa: int, line: int
) -> tuple[bytes | None, bytearray]:
    """32-bit positions (None: all units, in order), and the new units."""
    dtype = Dtype("", 0, 8 * unit, exponent, mantissa)
    stale = None if old is None else _units(old, unit)
    with np.errstate(over="ignore"):
        positions, values = encodings.decode_block(_bytes(data), stale, count, dtype, line)
    return None if positions is None else positions.astype("<u4").tobytes(), bytearray(values.tobytes())


def patch_block(
    data: Buffer,
    target: Buffer,
    fresh: bool,
    unit: int,
    exponent: int,
    mantissa: int,
    line: int,
    word: int,
    start: int,
) -> tuple[bytes | None, bytearray, int, int]:
    """Decodes a block into its base, or without a base if `fresh`. After an error the target is unchanged.

    Returns positions in any order, the old units, and the change of the digest.
    """
    units = _units(target, unit)
    positions, values = decode_block(data, None if fresh else units, len(units), unit, exponent, mantissa, line)
    return positions, values, *swap_block(target, positions, values, unit, word, start)


def swap_block(
    target: Buffer, positions: Buffer | None, values: Buffer, unit: int, word: int, start: int
) -> tuple[int, int]:
    """Exchanges the values with the units of the target. Returns the change of the digest."""
    units, incoming = _units(target, unit), _units(values, unit)
    at = np.arange(len(units)) if positions is None else np.frombuffer(positions, "<u4").astype(np.int64)
    touched = np.unique(at * unit // word)
    places = touched.astype(np.uint64) + np.uint64(start)
    removed = digest_words(_words(target, word)[touched], places)
    outgoing = units[at]
    units[at] = incoming
    incoming[:] = outgoing
    return _less(digest_words(_words(target, word)[touched], places), removed)


def digest_change(
    old: Buffer, positions: Buffer | None, values: Buffer, unit: int, word: int, start: int
) -> tuple[int, int]:
    """The change of the digest if these values were swapped in. Writes nothing. Positions must ascend."""
    units, incoming = _units(old, unit), _units(values, unit)
    at = np.arange(len(units)) if positions is None else np.frombuffer(positions, "<u4").astype(np.int64)
    if len(at) != len(incoming) or (at[1:] <= at[:-1]).any() or (at >= len(units)).any():
        raise TypeError("positions do not ascend, lie outside their block, or differ in number from the values")
    per_word = word // unit
    touched = np.unique(at // per_word)
    after = units.reshape(-1, per_word)[touched]
    after[np.searchsorted(touched, at // per_word), at % per_word] = incoming
    places = touched.astype(np.uint64) + np.uint64(start)
    removed = digest_words(_words(old, word)[touched], places)
    return _less(digest_words(_words(after, word), places), removed)


def replace_block(target: Buffer, source: Buffer, unit: int) -> tuple[bytes | None, bytearray]:
    """Copies the source to the target. Returns the positions that differed, and the old units.

    If all old units take less space, returns these, and None for the positions.
    """
    units, incoming = _units(target, unit), _units(source, unit)
    if len(units) != len(incoming) or np.may_share_memory(units, incoming):
        raise TypeError("target and source are of different sizes, or overlap")
    at = np.flatnonzero(units != incoming)
    listed = len(at) * (unit + 4) <= len(units) * unit
    outgoing = units[at] if listed else units.copy()
    units[at] = incoming[at]
    return at.astype("<u4").tobytes() if listed else None, bytearray(outgoing.tobytes())


def digest(data: Buffer, word: int, start: int) -> tuple[int, int]:
    """The digest of a run of words. The first word has index `start`."""
    words = _words(data, word)
    return digest_words(words, np.arange(len(words), dtype=np.uint64) + np.uint64(start))


def _bytes(buffer: Buffer) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)


def _units(buffer: Buffer, width: int) -> Units:
    units: Units = np.frombuffer(buffer, f"<u{width}")
    return units


def _words(buffer: Buffer, width: int) -> Words:
    return _units(buffer, width).astype(np.uint64)


def _less(added: tuple[int, int], removed: tuple[int, int]) -> tuple[int, int]:
    return (added[0] - removed[0]) % 2**64, (added[1] - removed[1]) % 2**64
