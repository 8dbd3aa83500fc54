"""The table of dtypes: safetensors names, widths, and the names in NumPy and torch.

To add a dtype, add a line to `DTYPES`. A tensor's *units* are what the codec handles: its elements, or the bytes of a
packed sub-byte dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["BY_ARRAY_NAME", "BY_CODE", "DTYPES", "Dtype"]


@dataclass(frozen=True)
class Dtype:
    """One safetensors dtype.

    `code` identifies it in packed metadata and never changes. `bits` is the width of an element in a file. Floats have
    a sign, `exponent` bits and `mantissa` bits. `array_name` is the name in NumPy (with ml_dtypes) and torch, or empty.
    """

    name: str
    code: int
    bits: int
    exponent: int = 0
    mantissa: int = 0
    array_name: str = ""

    def __hash__(self) -> int:
        return hash(self.name)  # often asked for: one field is enough

    @cached_property
    def unit(self) -> int:
        """Bytes of one unit."""
        return max(1, self.bits // 8)

    @cached_property
    def coded(self) -> Dtype:
        """The dtype of what the codec counts steps between: of the bytes of a unit if it is not a float."""
        return self if self.is_float or self.unit == 1 else Dtype("", self.code, 8)

    @property
    def is_float(self) -> bool:
        return self.exponent > 0

    @property
    def is_castable(self) -> bool:
        """True for floats of 16 bits or more. Casting to narrower ones would be quantization."""
        return self.is_float and self.bits >= 16

    @property
    def packed(self) -> int:
        """Elements per unit. For 2, shapes count units in torch and elements in safetensors."""
        return 8 // self.bits if self.bits < 8 else 1

    def nbytes(self, shape: Sequence[int]) -> int | None:
        """Size of a tensor of this shape in bytes, or None if a packed dtype would end inside a byte."""
        total = math.prod(shape) * self.bits
        return total // 8 if total % 8 == 0 else None


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("BOOL", 0, 8, array_name="bool"),
        Dtype("U8", 1, 8, array_name="uint8"),
        Dtype("I8", 2, 8, array_name="int8"),
        Dtype("U16", 3, 16, array_name="uint16"),
        Dtype("I16", 4, 16, array_name="int16"),
        Dtype("U32", 5, 32, array_name="uint32"),
        Dtype("I32", 6, 32, array_name="int32"),
        Dtype("U64", 7, 64, array_name="uint64"),
        Dtype("I64", 8, 64, array_name="int64"),
        Dtype("F64", 9, 64, exponent=11, mantissa=52, array_name="float64"),
        Dtype("F32", 10, 32, exponent=8, mantissa=23, array_name="float32"),
        Dtype("F16", 11, 16, exponent=5, mantissa=10, array_name="float16"),
        Dtype("BF16", 12, 16, exponent=8, mantissa=7, array_name="bfloat16"),
        Dtype("F8_E4M3", 13, 8, exponent=4, mantissa=3, array_name="float8_e4m3fn"),
        Dtype("F8_E5M2", 14, 8, exponent=5, mantissa=2, array_name="float8_e5m2"),
        Dtype("F8_E4M3FNUZ", 15, 8, exponent=4, mantissa=3, array_name="float8_e4m3fnuz"),
        Dtype("F8_E5M2FNUZ", 16, 8, exponent=5, mantissa=2, array_name="float8_e5m2fnuz"),
        Dtype("F8_E8M0", 17, 8, array_name="float8_e8m0fnu"),
        Dtype("C64", 18, 64, array_name="complex64"),
        Dtype("F4", 19, 4, array_name="float4_e2m1fn_x2"),
        Dtype("F6_E2M3", 20, 6),
        Dtype("F6_E3M2", 21, 6),
    )
}

BY_CODE: dict[int, Dtype] = {dtype.code: dtype for dtype in DTYPES.values()}
BY_ARRAY_NAME: dict[str, Dtype] = {dtype.array_name: dtype for dtype in DTYPES.values() if dtype.array_name}
