"""A little-endian bit stream, exp-Golomb codes and varints.

Part of the executable specification (docs/FORMAT.md, "Numbers"). Reading past the end raises ValueError. The caller
adds the file and the tensor to the error.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

__all__ = ["BitReader", "BitWriter", "read_uvarint", "unzigzag", "uvarint", "zigzag"]

BitArray = npt.NDArray[np.uint8]


def uvarint(value: int) -> bytes:
    """Seven bits per byte, lowest first. The high bit means that more bytes follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_uvarint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at `at`, and the position after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64 or (byte == 0 and shift):
                break
            return value, at
    raise ValueError("a number is not written in its shortest form or exceeds 64 bits")


def zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def unzigzag(value: int) -> int:
    return value >> 1 if value & 1 == 0 else -((value + 1) >> 1)


@functools.lru_cache(1 << 12)  # most numbers are small and repeat
def _bits_of(value: int, width: int) -> BitArray:
    return np.array([value >> i & 1 for i in range(width)], np.uint8)


class BitWriter:
    """Appends numbers, lowest bit first."""

    def __init__(self) -> None:
        self._parts: list[BitArray] = []

    def number(self, value: int, width: int) -> None:
        self._parts.append(_bits_of(value, width))

    def golomb(self, value: int, order: int) -> None:
        """Exp-Golomb: the number of bits beyond `order` in unary, then value + 2^order without its top bit."""
        shifted = value + (1 << order)
        width = shifted.bit_length() - 1
        self.number((1 << (width - order)) - 1, width - order + 1)
        self.number(shifted & ((1 << width) - 1), width)

    def numbers(self, values: npt.NDArray[np.uint64], widths: npt.NDArray[np.int64]) -> None:
        """Many numbers, each with its own width."""
        ends = np.cumsum(widths)
        out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
        starts = ends - widths
        for bit in range(int(widths.max(initial=0))):
            has = widths > bit
            out[starts[has] + bit] = (values[has] >> np.uint64(bit)) & np.uint64(1)
        self._parts.append(out)

    @property
    def width(self) -> int:
        """The number of bits so far."""
        return sum(map(len, self._parts))

    def extend(self, other: BitWriter) -> None:
        self._parts += other._parts

    def to_bytes(self) -> bytes:
        return np.packbits(np.concatenate([np.zeros(0, np.uint8), *self._parts]), bitorder="little").tobytes()


class BitReader:
    """Reads what a BitWriter wrote."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        self._at = 0

    def _next(self, count: int) -> BitArray:
        if count > len(self._bits) - self._at:
            raise ValueError("its bit stream is too short")
        self._at += count
        return self._bits[self._at - count : self._at]

    def number(self, width: int) -> int:
        return int.from_bytes(np.packbits(self._next(width), bitorder="little").tobytes(), "little")

    def golomb(self, order: int) -> int:
        width = order
        while self.number(1):
            width += 1
            if width > 32:
                raise ValueError("a count is out of range")
        return self.number(width) + (1 << width) - (1 << order)

    def numbers(self, widths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        ends = np.cumsum(widths)
        bits = self._next(int(ends[-1]) if len(ends) else 0)
        starts = ends - widths
        out = np.zeros(len(widths), np.uint64)
        for bit in range(int(widths.max(initial=0))):
            has = widths > bit
            out[has] |= bits[starts[has] + bit].astype(np.uint64) << np.uint64(bit)
        return out

    def finish(self, *, padded: bool = False) -> None:
        """Checks that only zero bits are left: less than a byte, unless the stream is padded."""
        rest = self._bits[self._at :]
        if (len(rest) > 7 and not padded) or rest.any():
            raise ValueError("its bit stream is too long")
