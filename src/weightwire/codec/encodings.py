"""Encodes and decodes one block: the executable specification, in NumPy.

docs/FORMAT.md, "Blocks", describes it in words. The C kernel gives the same bytes and is tested against this module. A
malformed block raises ValueError; the caller adds the file and the tensor.
"""

from __future__ import annotations

import numpy as np

from weightwire.codec.block_frame import DENSE, FULL, LANES
from weightwire.codec.dense_encoding import decode_dense, encode_dense
from weightwire.codec.exponent_classes import Units, choose_classes
from weightwire.codec.full_encoding import decode_full, encode_full
from weightwire.codec.ulp_encoding import Positions, decode_ulp, encode_ulp
from weightwire.weights import Dtype

__all__ = ["decode_block", "encode_block"]


def encode_block(old: Units | None, new: Units, dtype: Dtype, line: int) -> bytes:
    """The encoding of a block that should be shortest, empty if nothing changed.

    `line` is the length of a line, or 0 if the block is not made of whole lines.
    """
    if old is None:
        return encode_full(new, dtype)
    if (old == new).all():
        return b""
    steps = _encode_steps(_coded(old, dtype), _coded(new, dtype), dtype.coded, line * dtype.unit // dtype.coded.unit)
    if 8 * len(steps) <= 5 * new.nbytes:
        return steps
    return min(steps, encode_full(new, dtype), key=len)


def _encode_steps(old: Units, new: Units, dtype: Dtype, line: int) -> bytes:
    choice = choose_classes(old, new, dtype)
    encode = encode_dense if choice.is_dense else encode_ulp
    return encode(old, new, dtype, line, choice.bounds)


def decode_block(
    data: memoryview, old: Units | None, length: int, dtype: Dtype, line: int
) -> tuple[Positions | None, Units]:
    """The changed positions (None: all units) and the new units. Writes nothing."""
    kind = data[0] & 3
    if kind == 0 or (data[0] >> 2 & 3) >= len(LANES) or data[0] >> 4 > (kind != FULL):
        raise ValueError("it has an unknown encoding")
    if kind == FULL:
        return None, decode_full(data, length, dtype)
    if old is None:
        raise ValueError("it needs a base")
    coded, line = _coded(old, dtype), line * dtype.unit // dtype.coded.unit
    if kind == DENSE:
        return None, decode_dense(data, coded, dtype.coded, line).view(old.dtype)
    positions, values = decode_ulp(data, coded, dtype.coded, line)
    if coded is old:
        return positions, values
    new = coded.copy()
    new[positions] = values
    changed = np.unique(positions // dtype.unit)
    return changed, new.view(old.dtype)[changed]


def _coded(units: Units, dtype: Dtype) -> Units:
    """Units as `ulp` and `dense` see them: those that are not floats as bytes, because few bytes of one change."""
    return units if dtype.coded is dtype else units.view(np.uint8)
