"""The dtypes of safetensors, seen as bits: how wide, and where the exponent sits.

Knows no array library and no file. A tensor's *units* are what the codec handles: its elements, or the bytes
of a packed sub-byte dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BY_CODE", "DTYPES", "Dtype"]


@dataclass(frozen=True)
class Dtype:
    """One safetensors dtype.

    `code` stands for it in packed metadata and never changes. `bits` is what one element takes in a file.
    Floats have `exponent` bits above `mantissa` bits, and a sign on top; all else has none.
    """

    name: str
    code: int
    bits: int
    exponent: int = 0
    mantissa: int = 0

    @property
    def unit(self) -> int:
        """Bytes of one unit."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.exponent > 0

    def nbytes(self, shape: Sequence[int]) -> int | None:
        """Bytes of a tensor of this shape; None where a packed dtype would end inside a byte."""
        total = math.prod(shape) * self.bits
        return total // 8 if total % 8 == 0 else None


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("BOOL", 0, 8),
        Dtype("U8", 1, 8),
        Dtype("I8", 2, 8),
        Dtype("U16", 3, 16),
        Dtype("I16", 4, 16),
        Dtype("U32", 5, 32),
        Dtype("I32", 6, 32),
        Dtype("U64", 7, 64),
        Dtype("I64", 8, 64),
        Dtype("F64", 9, 64, exponent=11, mantissa=52),
        Dtype("F32", 10, 32, exponent=8, mantissa=23),
        Dtype("F16", 11, 16, exponent=5, mantissa=10),
        Dtype("BF16", 12, 16, exponent=8, mantissa=7),
        Dtype("F8_E4M3", 13, 8, exponent=4, mantissa=3),
        Dtype("F8_E5M2", 14, 8, exponent=5, mantissa=2),
        Dtype("F8_E4M3FNUZ", 15, 8, exponent=4, mantissa=3),
        Dtype("F8_E5M2FNUZ", 16, 8, exponent=5, mantissa=2),
        Dtype("F8_E8M0", 17, 8),
        Dtype("C64", 18, 64),
        Dtype("F4", 19, 4),
        Dtype("F6_E2M3", 20, 6),
        Dtype("F6_E3M2", 21, 6),
    )
}

BY_CODE: dict[int, Dtype] = {dtype.code: dtype for dtype in DTYPES.values()}
