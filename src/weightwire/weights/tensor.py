"""A tensor as bits. Everywhere else weights are a mapping of names to these."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from weightwire.errors import CheckpointError
from weightwire.weights.dtypes import Dtype

__all__ = ["Bits", "HeldWeights", "Rows", "Tensor", "Weights", "nbytes_of", "refuse", "unit_dtype"]

_Byte = ctypes.c_char

Bits = npt.NDArray[np.unsignedinteger]
Rows = tuple[int, int]
"""First row, and last row + 1."""


_UNITS: dict[int, np.dtype[np.unsignedinteger]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


def unit_dtype(dtype: Dtype) -> np.dtype[np.unsignedinteger]:
    return _UNITS[dtype.unit]


@dataclass(frozen=True, eq=False, init=False)
class Tensor:
    """One tensor as bits: flat, contiguous, little-endian unsigned integers of `dtype.unit` bytes.

    `bits` is a view of the caller's memory. It is writable if that memory is, and may be unaligned, as in safetensors
    files. A rank's shard has the `shape` of the whole tensor, and `bits` holds only its `rows`.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    bits: Bits
    rows: Rows | None = None

    def __init__(self, dtype: Dtype, shape: tuple[int, ...], bits: Bits, rows: Rows | None = None) -> None:
        # Models have 100,000 tensors: several times as fast as what a frozen dataclass generates.
        fields = self.__dict__
        fields["dtype"], fields["shape"], fields["bits"], fields["rows"] = dtype, shape, bits, rows

    @classmethod
    def at(cls, buffer: Any, offset: int, dtype: Dtype, shape: tuple[int, ...]) -> Self:
        """A view into a buffer that is large enough."""
        nbytes = dtype.nbytes(shape)
        if nbytes is None:
            raise ValueError(f"{dtype.name} {list(shape)} ends inside a byte")
        return cls(dtype, shape, np.frombuffer(buffer, unit_dtype(dtype), nbytes // dtype.unit, offset))

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.bits)

    @property
    def place(self) -> object:
        """Identifies the memory, to detect tied weights. None for an empty tensor."""
        return address_of(self.bits) if self.bits.size else None

    def copy_to(self, begin: int, end: int, out: Bits) -> None:
        """Copies the units from `begin` to before `end`."""
        np.copyto(out, self.bits[begin:end])


def address_of(bits: Any) -> int:
    """Where an array begins in memory. It must not be empty."""
    try:
        return ctypes.addressof(_Byte.from_buffer(bits))  # several times as fast, but only for writable arrays
    except TypeError:
        return int(bits.__array_interface__["data"][0])


Weights = Mapping[str, Tensor]


class HeldWeights(Mapping[str, Tensor]):
    """Weights that are tensors already. `read_weights` returns them as they are."""


def nbytes_of(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """Raises the error for a value that cannot be read as a tensor."""
    raise CheckpointError(f"tensor {name!r}: {what}", hint=hint)
