"""One tensor's old and new bits -> bytes, and back.

Works on blocks of a tensor that the caller cuts out with a Layout; knows no file, no name and no bucket. The C kernel
does the work where it was built; the NumPy implementation (`numpy_kernel`) gives the same bytes where it was not.
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
]


class Kernel(Protocol):
    """What both implementations offer; see numpy_kernel.py for the meaning."""

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
    """That blocks are encoded by the C kernel, and not by NumPy."""
    return KERNEL is not numpy_kernel


_ENCODINGS = {ULP: "ulp", DENSE: "dense", FULL: "full"}

Digest = tuple[int, int]


@dataclass(frozen=True)
class EncodedBlock:
    """A block's bytes (none where nothing changed), its changed units, and what they add to the digest."""

    data: bytes
    changed: int
    digest: Digest


@dataclass(frozen=True)
class Patch:
    """Where a block changes, as 32-bit positions (None: everywhere), and the units that belong there."""

    positions: bytes | None
    values: bytearray


def encoding(data: bytes | memoryview) -> str:
    """How a block is encoded."""
    return _ENCODINGS.get(data[0] & 3, "unknown")


def encode(old: Units | None, new: Units, layout: Layout, index: int) -> EncodedBlock:
    """Encodes one block of a tensor, in the shortest way; without `old`, so that no base is needed."""
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
    """Decodes one block against its base. Raises ValueError with the reason where it is malformed; writes nothing."""
    dtype = layout.dtype
    begin, end = layout.span(index)
    base = None if old is None else old[begin:end]
    return Patch(*KERNEL.decode_block(data, base, end - begin, dtype.unit, dtype.exponent, dtype.mantissa, layout.line))


def apply(data: bytes | memoryview, target: Units, layout: Layout, index: int, *, fresh: bool) -> tuple[Patch, Digest]:
    """Decodes one block into its base, or over whatever is there if it is fresh: `decode` and `swap` in one.

    Raises ValueError with the reason where it is malformed; the target is then as it was.
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
    """Writes a patch into its block, and the old units into the patch: doing it twice undoes it."""
    begin, end = layout.span(index)
    return swap_units(target[begin:end], patch, layout.word, layout.word_index(begin))


def swap_units(target: Units, patch: Patch, word: int, start: int) -> Digest:
    """The same for units that are a whole block by themselves, the first of which is in word `start`."""
    return KERNEL.swap_block(target, patch.positions, patch.values, target.dtype.itemsize, word, start)


def digest_change(old: Units, patch: Patch, layout: Layout, index: int) -> Digest:
    """What a patch adds to the digest of its block, which is only read. The patch is one that `decode` made."""
    begin, end = layout.span(index)
    start = layout.word_index(begin)
    return KERNEL.digest_change(old[begin:end], patch.positions, patch.values, layout.dtype.unit, layout.word, start)


def replace(target: Units, source: Units, layout: Layout, index: int) -> Patch:
    """Makes one block of the target equal to the source's; returns what to `swap` in to undo it."""
    begin, end = layout.span(index)
    return Patch(*KERNEL.replace_block(target[begin:end], source[begin:end], layout.dtype.unit))


def digest(units: Units, layout: Layout, index: int) -> Digest:
    """The digest of one block; a tensor's is the sum of its blocks'."""
    begin, end = layout.span(index)
    return KERNEL.digest(units[begin:end], layout.word, layout.word_index(begin))
