"""The `full` encoding: all new units of a block, as byte planes.

Part of the executable specification (docs/FORMAT.md, "full").
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightwire.codec.bit_stream import BitReader, BitWriter
from weightwire.codec.block_frame import FULL, entropy_coded, read_entropy_coded
from weightwire.codec.exponent_classes import Units
from weightwire.codec.frequency_tables import Shares, lg, quantise, read_levels, shares, write_levels
from weightwire.codec.rans import Section
from weightwire.weights import Dtype

__all__ = ["BYTES_PER_BYTE", "decode_full", "encode_full"]

BYTES_PER_BYTE = 1024  # the highest compression ratio: limits decompression bombs


def encode_full(new: Units, dtype: Dtype) -> bytes:
    rotated = _rotated(new, dtype)
    planes = np.ascontiguousarray(rotated).view(np.uint8).reshape(len(rotated), rotated.itemsize).T
    bits = BitWriter()
    sections: list[Section] = []
    raw = b""
    raw_planes = 0
    for index, plane in enumerate(planes):
        counts = np.bincount(plane, minlength=256)
        levels = quantise(counts)
        table = shares(levels, 1)
        own = BitWriter()
        write_levels(own, levels)
        if _worth_coding(counts, table, own.width, len(plane)):
            bits.extend(own)
            sections.append(Section.of(plane, table))
        else:
            raw_planes |= 1 << index
            raw += plane.tobytes()
    block = entropy_coded(FULL, sections) + bytes([raw_planes]) + raw + bits.to_bytes()
    return block.ljust(-(-rotated.nbytes // BYTES_PER_BYTE), b"\0")


def decode_full(data: memoryview, length: int, dtype: Dtype) -> Units:
    like: np.dtype[np.unsignedinteger] = np.dtype(f"<u{dtype.unit}")
    if len(data) * BYTES_PER_BYTE < length * like.itemsize:
        raise ValueError("it is too short for what it claims to hold")
    decoder, rest = read_entropy_coded(data)
    if not len(rest) or rest[0] >> like.itemsize:
        raise ValueError("its byte planes are out of range")
    raw_planes, at = rest[0], 1
    planes = np.zeros((length, like.itemsize), np.uint8)
    coded = [index for index in range(like.itemsize) if not raw_planes >> index & 1]
    for index in sorted(set(range(like.itemsize)) - set(coded)):
        if len(rest) - at < length:
            raise ValueError("a byte plane is too short")
        planes[:, index] = np.frombuffer(rest, np.uint8, length, at)
        at += length
    bits = BitReader(rest[at:])
    tables = [shares(read_levels(bits, 256), 1) for _ in coded]
    for index, table in zip(coded, tables, strict=True):
        planes[:, index] = decoder.section(length, table)
    decoder.finish()
    bits.finish(padded=len(data) * BYTES_PER_BYTE < (length * like.itemsize) + BYTES_PER_BYTE)
    return _unrotated(planes.view(like).ravel(), dtype)


def _rotated(units: Units, dtype: Dtype) -> Units:
    """Moves the sign of floats to the lowest bit. The top byte then holds only exponent bits."""
    if not dtype.is_float:
        return units
    width = units.dtype.type(8 * units.itemsize - 1)
    return units << units.dtype.type(1) | units >> width


def _unrotated(units: Units, dtype: Dtype) -> Units:
    if not dtype.is_float:
        return units
    width = units.dtype.type(8 * units.itemsize - 1)
    return units >> units.dtype.type(1) | units << width


def _worth_coding(counts: npt.NDArray[np.int64], table: Shares, table_bits: int, length: int) -> bool:
    """True if coding a plane saves more than 1/64 of it, including its table."""
    cost: int = sum(n * ((12 << 24) - lg(table[s])) for s, n in enumerate(counts.tolist()) if n)
    return 64 * (cost + (table_bits << 24)) < 63 * 8 * length << 24
