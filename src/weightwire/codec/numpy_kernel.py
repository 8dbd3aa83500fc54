"""The functions of the kernel in NumPy: the same names, arguments and results as the C extension `_kernel`.

The front door of the executable specification, and the fallback if the kernel was not built.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec import encodings
from weightwire.codec.digest import Words, digest_terms
from weightwire.codec.exponent_classes import Units
from weightwire.weights import Dtype

__all__ = [
    "decode_block",
    "digest",
    "digest_change",
    "encode_block",
    "patch_block",
    "replace_block",
    "swap_block",
    "trim",
]

Buffer = bytes | bytearray | memoryview | Units
BlockBuffers = Buffer | tuple[Buffer, ...]  # one buffer, or one for each segment
Indices = npt.NDArray[np.int64]


def encode_block(
    old: BlockBuffers | None,
    new: BlockBuffers,
    unit: int,
    exponent: int,
    mantissa: int,
    line: int,
    segment: int,
    word: int,
    start: int,
) -> tuple[bytes, bytes, bytes]:
    """The bytes of a block, and for each segment the number of changed units and the change of the digest.

    A segment has `segment` units. Its first word has the index `start` in the digest.
    """
    dtype = Dtype("", 0, 8 * unit, exponent, mantissa)
    fresh = _joined(new, unit)
    if old is None:
        counts = np.full(len(fresh) // segment, segment, "<u4")
        return encodings.encode_block(None, fresh, dtype, line), counts.tobytes(), bytes(16 * len(counts))
    stale = _joined(old, unit)
    changed = np.flatnonzero(fresh != stale)
    counts = np.bincount(changed // segment, minlength=len(fresh) // segment).astype("<u4")
    where = _SegmentWords(len(fresh), unit, segment, word, start)
    touched = where.of(changed)
    added = where.sums(touched, _words(fresh, word)[touched]) - where.sums(touched, _words(stale, word)[touched])
    return encodings.encode_block(stale, fresh, dtype, line), counts.tobytes(), added.tobytes()


def decode_block(
    data: Buffer, old: BlockBuffers | None, count: int, unit: int, exponent: int, mantissa: int, line: int
) -> tuple[bytes | None, bytearray]:
    """32-bit positions (None: all units, in order), and the new units."""
    dtype = Dtype("", 0, 8 * unit, exponent, mantissa)
    stale = None if old is None else _joined(old, unit)
    with np.errstate(over="ignore"):
        positions, values = encodings.decode_block(_bytes(data), stale, count, dtype, line)
    return None if positions is None else positions.astype("<u4").tobytes(), bytearray(values.tobytes())


def patch_block(
    data: Buffer,
    target: BlockBuffers,
    fresh: bool,
    unit: int,
    exponent: int,
    mantissa: int,
    line: int,
    segment: int,
    word: int,
    start: int,
) -> tuple[bytes | None, bytearray, bytes]:
    """Decodes a block into its base, or without a base if `fresh`. After an error the target is unchanged.

    Returns positions in any order within a segment, the old units, and the changes of the digests.
    """
    units = _joined(target, unit)
    positions, values = decode_block(data, None if fresh else units, len(units), unit, exponent, mantissa, line)
    return positions, values, swap_block(target, positions, values, unit, segment, word, start)


def swap_block(
    target: BlockBuffers, positions: Buffer | None, values: Buffer, unit: int, segment: int, word: int, start: int
) -> bytes:
    """Exchanges the values with the units of the target. Returns the changes of the digests."""
    units, incoming = _joined(target, unit), _units(values, unit)
    at = np.arange(len(units)) if positions is None else np.frombuffer(positions, "<u4").astype(np.int64)
    where = _SegmentWords(len(units), unit, segment, word, start)
    touched = where.of(at)
    removed = where.sums(touched, _words(units, word)[touched])
    outgoing = units[at]
    units[at] = incoming
    incoming[:] = outgoing
    _spread(units, target)
    return (where.sums(touched, _words(units, word)[touched]) - removed).tobytes()


def digest_change(
    old: BlockBuffers, positions: Buffer | None, values: Buffer, unit: int, segment: int, word: int, start: int
) -> bytes:
    """The changes of the digests if these values were swapped in. Writes nothing. Positions must ascend."""
    units, incoming = _joined(old, unit), _units(values, unit)
    at = np.arange(len(units)) if positions is None else np.frombuffer(positions, "<u4").astype(np.int64)
    if len(at) != len(incoming) or (at[1:] <= at[:-1]).any() or (at >= len(units)).any():
        raise TypeError("positions do not ascend, lie outside their block, or differ in number from the values")
    where, per_word = _SegmentWords(len(units), unit, segment, word, start), word // unit
    touched = where.of(at)
    after = units.reshape(-1, per_word)[touched]
    after[np.searchsorted(touched, at // per_word), at % per_word] = incoming
    return (where.sums(touched, _words(after, word)) - where.sums(touched, _words(units, word)[touched])).tobytes()


def replace_block(
    target: BlockBuffers, source: BlockBuffers, unit: int, segment: int
) -> tuple[bytes | None, bytearray]:
    """Copies the source to the target. Returns the positions that differed, and the old units.

    If all old units take less space, returns these, and None for the positions.
    """
    units, incoming = _joined(target, unit), _joined(source, unit)
    if len(units) != len(incoming) or len(units) % segment or np.may_share_memory(units, incoming):
        raise TypeError("target and source are of different sizes, or overlap")
    at = np.flatnonzero(units != incoming)
    listed = len(at) * (unit + 4) <= len(units) * unit
    outgoing = units[at] if listed else units.copy()
    units[at] = incoming[at]
    _spread(units, target)
    return at.astype("<u4").tobytes() if listed else None, bytearray(outgoing.tobytes())


def digest(data: BlockBuffers, unit: int, segment: int, word: int, start: int) -> bytes:
    """The digest of each segment."""
    words = _words(_joined(data, unit), word)
    where = _SegmentWords(len(words) * word // unit, unit, segment, word, start)
    return where.sums(np.arange(len(words)), words).tobytes()


@dataclass(frozen=True)
class _SegmentWords:
    """The words of a block of `count` units, by their position in the block, and the digests of its segments."""

    count: int
    unit: int
    segment: int
    word: int
    start: int

    def of(self, units: Indices) -> Indices:
        """The words that hold these units, each once."""
        return np.unique(units * self.unit // self.word)

    def sums(self, at: Indices, words: Words) -> Words:
        """The two sums over these words for each segment."""
        per_segment = self.segment * self.unit // self.word
        terms = digest_terms(words, (at % per_segment).astype(np.uint64) + np.uint64(self.start))
        sums = np.zeros((self.count // self.segment, 2), np.uint64)
        for lane in range(2):
            np.add.at(sums[:, lane], at // per_segment, terms[lane])
        return sums


def _bytes(buffer: Buffer) -> memoryview:
    return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)


def _joined(block: BlockBuffers, width: int) -> Units:
    """The units of all segments: the block itself, or a copy."""
    return np.concatenate([_units(one, width) for one in block]) if isinstance(block, tuple) else _units(block, width)


def _spread(units: Units, block: BlockBuffers) -> None:
    """Writes the units of a copy into the segments."""
    begin = 0
    for one in block if isinstance(block, tuple) else ():
        members = _units(one, units.dtype.itemsize)
        members[:] = units[begin : begin + len(members)]
        begin += len(members)


def trim() -> None:
    """Frees kept memory. This implementation keeps none."""


def _units(buffer: Buffer, width: int) -> Units:
    units: Units = np.frombuffer(buffer, f"<u{width}")
    return units


def _words(buffer: Buffer, width: int) -> Words:
    return _units(buffer, width).astype(np.uint64)
