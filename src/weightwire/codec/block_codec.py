"""Encodes, decodes, swaps and digests blocks of a tensor, which a Layout defines.

Uses the C kernel, or the NumPy implementation (`numpy_kernel`) if the kernel was not built. Both give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from weightwire.codec import numpy_kernel
from weightwire.codec.block_frame import DENSE, FULL, ULP
from weightwire.codec.block_layout import Layout
from weightwire.codec.exponent_classes import Units

__all__ = [
    "KERNEL",
    "Digest",
    "EncodedBlock",
    "Kernel",
    "Patch",
    "apply",
    "decode",
    "digest",
    "digest_change",
    "encode",
    "encoding",
    "has_kernel",
    "replace",
    "swap",
    "swap_units",
    "vector_bits",
]


class Kernel(Protocol):
    """The functions of both implementations. numpy_kernel.py documents them."""

    def encode_block(
        self, old: Any, new: Any, unit: int, exponent: int, mantissa: int, line: int, word: int, start: int, /
    ) -> tuple[bytes, int, int, int]: ...
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
        word: int,
        start: int,
        /,
    ) -> tuple[bytes | None, bytearray, int, int]: ...
    def swap_block(
        self, target: Any, positions: Any, values: Any, unit: int, word: int, start: int, /
    ) -> tuple[int, int]: ...
    def replace_block(self, target: Any, source: Any, unit: int, /) -> tuple[bytes | None, bytearray]: ...
    def digest_change(
        self, old: Any, positions: Any, values: Any, unit: int, word: int, start: int, /
    ) -> tuple[int, int]: ...
    def digest(self, data: Any, word: int, start: int, /) -> tuple[int, int]: ...


KERNEL: Kernel
try:
    from weightwire.codec import _kernel as _kernel

    KERNEL = _kernel
except ImportError:  # installed without a compiler
    KERNEL = numpy_kernel


def has_kernel() -> bool:
    """True if the C kernel is in use, False for NumPy."""
    return KERNEL is not numpy_kernel


def vector_bits() -> int | None:
    """The width of the vector instructions that the C kernel uses: 512, 256, or 0 for none. None without the kernel."""
    return _kernel.vectors(512) if has_kernel() else None


_ENCODINGS = {ULP: "ulp", DENSE: "dense", FULL: "full"}

Digest = tuple[int, int]


@dataclass(frozen=True)
class EncodedBlock:
    """The bytes of a block (empty if nothing changed), the number of changed units, and the change of the digest."""

    data: bytes
    changed: int
    digest: Digest


@dataclass(frozen=True)
class Patch:
    """The changes of a block: 32-bit positions (None: all units), and the new units."""

    positions: bytes | None
    values: bytearray


def encoding(data: bytes | memoryview) -> str:
    """The name of a block's encoding."""
    return _ENCODINGS.get(data[0] & 3, "unknown")


def encode(old: Units | None, new: Units, layout: Layout, index: int) -> EncodedBlock:
    """Encodes one block with the shortest encoding. Without `old`, the result needs no base."""
    dtype = layout.dtype
    begin, end = layout.span(index)
    data, changed, a, b = KERNEL.encode_block(
        None if old is None else old[begin:end],
        new[begin:end],
        dtype.unit,
        dtype.exponent,
        dtype.mantissa,
        layout.line,
        layout.word,
        layout.word_index(begin),
    )
    return EncodedBlock(data, changed, (a, b))


def decode(data: bytes | memoryview, old: Units | None, layout: Layout, index: int) -> Patch:
    """Decodes one block against its base. Writes nothing. Raises ValueError if the block is malformed."""
    dtype = layout.dtype
    begin, end = layout.span(index)
    base = None if old is None else old[begin:end]
    return Patch(*KERNEL.decode_block(data, base, end - begin, dtype.unit, dtype.exponent, dtype.mantissa, layout.line))


def apply(data: bytes | memoryview, target: Units, layout: Layout, index: int, *, fresh: bool) -> tuple[Patch, Digest]:
    """Decodes one block and writes it into the target: `decode` and `swap` in one. A fresh block needs no base.

    Raises ValueError if the block is malformed. The target is then unchanged.
    """
    dtype = layout.dtype
    begin, end = layout.span(index)
    positions, values, a, b = KERNEL.patch_block(
        data,
        target[begin:end],
        fresh,
        dtype.unit,
        dtype.exponent,
        dtype.mantissa,
        layout.line,
        layout.word,
        layout.word_index(begin),
    )
    return Patch(positions, values), (a, b)


def swap(target: Units, patch: Patch, layout: Layout, index: int) -> Digest:
    """Exchanges the units of a patch and of its block. A second call undoes it."""
    begin, end = layout.span(index)
    return swap_units(target[begin:end], patch, layout.word, layout.word_index(begin))


def swap_units(target: Units, patch: Patch, word: int, start: int) -> Digest:
    """Like `swap`, for an array that is one whole block. Its first unit is in word `start`."""
    return KERNEL.swap_block(target, patch.positions, patch.values, target.dtype.itemsize, word, start)


def digest_change(old: Units, patch: Patch, layout: Layout, index: int) -> Digest:
    """The change of the digest if a patch from `decode` were applied. Writes nothing."""
    begin, end = layout.span(index)
    start = layout.word_index(begin)
    return KERNEL.digest_change(old[begin:end], patch.positions, patch.values, layout.dtype.unit, layout.word, start)


def replace(target: Units, source: Units, layout: Layout, index: int) -> Patch:
    """Copies one block from the source to the target. Returns a patch for `swap` that undoes it."""
    begin, end = layout.span(index)
    return Patch(*KERNEL.replace_block(target[begin:end], source[begin:end], layout.dtype.unit))


def digest(units: Units, layout: Layout, index: int) -> Digest:
    """The digest of one block. The digest of a tensor is the sum over its blocks."""
    begin, end = layout.span(index)
    return KERNEL.digest(units[begin:end], layout.word, layout.word_index(begin))
