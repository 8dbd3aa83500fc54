"""One block: old and new bits -> bytes, and back. The executable specification, in NumPy.

docs/FORMAT.md, "Blocks", says the same in words. The C kernel produces the same bytes and is what normally runs;
this is what it is tested against, and what serves where no compiler was. Knows no file and no tensor name: a
malformed block raises ValueError with the reason only.
"""

from __future__ import annotations

from weightwire.codec.block_frame import DENSE, FOUR_LANES, FULL, LINES, ULP
from weightwire.codec.exponent_classes import Units
from weightwire.codec.plane_encodings import decode_dense, decode_full, encode_dense, encode_full
from weightwire.codec.ulp_encoding import Positions, decode_ulp, encode_ulp
from weightwire.weights import Dtype

__all__ = ["decode_block", "encode_block"]


def encode_block(old: Units | None, new: Units, dtype: Dtype, line: int) -> bytes:
    """The shortest encoding of a block; nothing where nothing changed.

    `line` is the length of a line where the block is made of whole lines that may be skipped, else 0.
    """
    if old is None:
        return encode_full(new, dtype)
    changed = int((old != new).sum())
    if changed == 0:
        return b""
    candidates = [encode_ulp(old, new, dtype, line)]
    if 8 * changed > len(new):
        candidates += [encode_dense(old, new, dtype), encode_full(new, dtype)]
    return min(candidates, key=len)


def decode_block(
    data: memoryview, old: Units | None, length: int, dtype: Dtype, line: int
) -> tuple[Positions | None, Units]:
    """Where a block changes (None: everywhere) and to what. Writes nothing."""
    kind, flags = data[0] & 3, data[0] & ~3
    if kind == 0 or flags & ~(FOUR_LANES | (LINES if kind == ULP else 0)):
        raise ValueError("it has an unknown encoding")
    if kind == FULL:
        return None, decode_full(data, length, dtype)
    if old is None:
        raise ValueError("it needs a base and there is none")
    if kind == DENSE:
        return None, decode_dense(data, old, dtype)
    return decode_ulp(data, old, dtype, line)
