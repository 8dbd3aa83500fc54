"""Encodes, decodes, swaps and digests blocks of a tensor, which a Layout defines.

Uses the C kernel, or the NumPy implementation (`numpy_kernel`) if the kernel was not built. Both give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weightwire.codec import numpy_kernel
from weightwire.codec.block_frame import DENSE, FULL, ULP
from weightwire.codec.block_layout import Layout
from weightwire.codec.exponent_classes import Units

__all__ = [
    "KERNEL",
    "BlockUnits",
    "Digest",
    "Digests",
    "EncodedBlock",
    "Kernel",
    "Patch",
    "apply",
    "decode",
    "digest",
    "digest_change",
    "digest_of",
    "encode",
    "encoding",
    "has_kernel",
    "replace",
    "swap",
    "swap_units",
    "trim",
    "vector_bits",
]


class Kernel(Protocol):
    """The functions of both implementations. numpy_kernel.py documents them."""

    def encode_block(
        self,
        old: Any,
        new: Any,
        unit: int,
        exponent: int,
        mantissa: int,
        line: int,
        segment: int,
        word: int,
        start: int,
        /,
    ) -> tuple[bytes, bytes, bytes]: ...
    def decode_block(
        self, data: Any, old: Any, count: int, unit: int, exponent: int, mantissa: int, line: int, /
    ) -> tuple[bytes | None, bytearray]: ...
    def patch_block(
        self,
        data: Any,
        target: Any,
        fresh: bool,
        unit: int,
        exponent: int,
        mantissa: int,
        line: int,
        segment: int,
        word: int,
        start: int,
        /,
    ) -> tuple[bytes | None, bytearray, bytes]: ...
    def swap_block(
        self, target: Any, positions: Any, values: Any, unit: int, segment: int, word: int, start: int, /
    ) -> bytes: ...
    def replace_block(self, target: Any, source: Any, unit: int, segment: int, /) -> tuple[bytes | None, bytearray]: ...
    def digest_change(
        self, old: Any, positions: Any, values: Any, unit: int, segment: int, word: int, start: int, /
    ) -> bytes: ...
    def digest(self, data: Any, unit: int, segment: int, word: int, start: int, /) -> bytes: ...
    def trim(self) -> None: ...


KERNEL: Kernel
try:
    from weightwire.codec import _kernel as _kernel

    KERNEL = _kernel
except ImportError:  # installed without a compiler
    KERNEL = numpy_kernel


def has_kernel() -> bool:
    """True if the C kernel is in use, False for NumPy."""
    return KERNEL is not numpy_kernel


def trim() -> None:
    """Frees the memory that the kernel keeps for the next block. Call it when no block comes soon."""
    KERNEL.trim()


def vector_bits() -> int | None:
    """The width of the vector instructions that the C kernel uses: 512, 256, or 0 for none. None without the kernel."""
    return _kernel.vectors(512) if has_kernel() else None


BlockUnits = Units | tuple[Units, ...]
"""The units of a tensor or, for a stack, the members: one behind the other in one array, or one array for each."""

_ENCODINGS = {ULP: "ulp", DENSE: "dense", FULL: "full"}

Digest = tuple[int, int]
"""The digest of one tensor."""

Digests = npt.NDArray[np.uint64]
"""One row for each segment of a block: sums a and b."""


@dataclass(frozen=True)
class EncodedBlock:
    """The bytes of a block (empty if nothing changed).

    Of each segment: the number of changed units, and the change of the digest.
    """

    data: bytes
    changed: npt.NDArray[np.uint32]
    digests: Digests

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, EncodedBlock)
            and self.data == other.data
            and np.array_equal(self.changed, other.changed)
            and np.array_equal(self.digests, other.digests)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Patch:
    """The changes of a block: 32-bit positions (None: all units), and the new units."""

    positions: bytes | None
    values: bytearray


def encoding(data: bytes | memoryview) -> str:
    """The name of a block's encoding."""
    return _ENCODINGS.get(data[0] & 3, "unknown")


def encode(old: BlockUnits | None, new: BlockUnits, layout: Layout, index: int) -> EncodedBlock:
    """Encodes one block. Without `old`, the result needs no base."""
    dtype = layout.dtype
    data, changed, digests = KERNEL.encode_block(
        None if old is None else _part(old, layout, index),
        _part(new, layout, index),
        dtype.unit,
        dtype.exponent,
        dtype.mantissa,
        layout.line,
        *_segments(layout, index),
    )
    return EncodedBlock(data, np.frombuffer(changed, "<u4"), _digests(digests))


def decode(data: bytes | memoryview, old: BlockUnits | None, layout: Layout, index: int) -> Patch:
    """Decodes one block against its base. Writes nothing. Raises ValueError if the block is malformed."""
    dtype = layout.dtype
    begin, end = layout.span(index)
    base = None if old is None else _part(old, layout, index)
    return Patch(*KERNEL.decode_block(data, base, end - begin, dtype.unit, dtype.exponent, dtype.mantissa, layout.line))


def apply(
    data: bytes | memoryview, target: BlockUnits, layout: Layout, index: int, *, fresh: bool
) -> tuple[Patch, Digests]:
    """Decodes one block and writes it into the target: `decode` and `swap` in one. A fresh block needs no base.

    Raises ValueError if the block is malformed. The target is then unchanged.
    """
    dtype = layout.dtype
    positions, values, digests = KERNEL.patch_block(
        data,
        _part(target, layout, index),
        fresh,
        dtype.unit,
        dtype.exponent,
        dtype.mantissa,
        layout.line,
        *_segments(layout, index),
    )
    return Patch(positions, values), _digests(digests)


def swap(target: BlockUnits, patch: Patch, layout: Layout, index: int) -> Digests:
    """Exchanges the units of a patch and of its block. A second call undoes it."""
    unit, where = layout.dtype.unit, _segments(layout, index)
    return _digests(KERNEL.swap_block(_part(target, layout, index), patch.positions, patch.values, unit, *where))


def swap_units(target: Units, patch: Patch, word: int, start: int) -> Digest:
    """Like `swap`, for an array that is one segment. Its first unit is in word `start`."""
    unit = target.dtype.itemsize
    swapped = KERNEL.swap_block(target, patch.positions, patch.values, unit, len(target), word, start)
    return digest_of(_digests(swapped))


def digest_change(old: BlockUnits, patch: Patch, layout: Layout, index: int) -> Digests:
    """The change of the digests if a patch from `decode` were applied. Writes nothing."""
    unit, where = layout.dtype.unit, _segments(layout, index)
    return _digests(KERNEL.digest_change(_part(old, layout, index), patch.positions, patch.values, unit, *where))


def replace(target: BlockUnits, source: BlockUnits, layout: Layout, index: int) -> Patch:
    """Copies one block from the source to the target. Returns a patch for `swap` that undoes it."""
    blocks = _part(target, layout, index), _part(source, layout, index)
    return Patch(*KERNEL.replace_block(*blocks, layout.dtype.unit, _segments(layout, index)[0]))


def digest(units: BlockUnits, layout: Layout, index: int) -> Digests:
    """The digests of one block. The digest of a tensor is the sum over its blocks."""
    return _digests(KERNEL.digest(_part(units, layout, index), layout.dtype.unit, *_segments(layout, index)))


def digest_of(digests: Digests) -> Digest:
    """The digest of the only segment of a block."""
    ((a, b),) = digests.tolist()
    return a, b


def _digests(data: bytes) -> Digests:
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def _part(units: BlockUnits, layout: Layout, index: int) -> BlockUnits:
    """One block of a tensor or stack."""
    begin, end = layout.span(index)
    return units[begin // layout.segment : end // layout.segment] if isinstance(units, tuple) else units[begin:end]


def _segments(layout: Layout, index: int) -> tuple[int, int, int]:
    """How the kernel digests a block: the units of a segment, the size of a word, and the index of the first word."""
    begin, end = layout.span(index)
    return min(layout.segment, end - begin), layout.word, layout.word_index(begin)
