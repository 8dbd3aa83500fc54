"""One tensor as bits. Every other module of weightwire sees weights as a mapping of names to these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from weightwire.errors import CheckpointError
from weightwire.weights.dtypes import Dtype

__all__ = ["Bits", "Rows", "Tensor", "Weights", "nbytes_of", "refuse", "unit_dtype"]

Bits = npt.NDArray[np.unsignedinteger]
Rows = tuple[int, int]
"""The rows of a tensor from the first to before the second."""


def unit_dtype(dtype: Dtype) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{dtype.unit}")


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor as bits: flat, contiguous, little-endian unsigned integers of `dtype.unit` bytes.

    `bits` is a view of memory that belongs to someone else: writable if that is, and not always aligned,
    since safetensors files need not be. A rank's shard has the whole tensor's `shape` and holds its `rows` from
    the first to before the second of them.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    bits: Bits
    rows: Rows | None = None

    @classmethod
    def at(cls, buffer: Any, offset: int, dtype: Dtype, shape: tuple[int, ...]) -> Self:
        """A view into a buffer, which is known to be large enough."""
        nbytes = dtype.nbytes(shape)
        if nbytes is None:
            raise ValueError(f"{dtype.name} {list(shape)} ends inside a byte")
        return cls(dtype, shape, np.frombuffer(buffer, unit_dtype(dtype), nbytes // dtype.unit, offset))

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    @property
    def count(self) -> int:
        """How many units."""
        return len(self.bits)

    @property
    def place(self) -> object:
        """Which memory this is: two names of the same one are one tensor. None where it takes none."""
        return self.bits.__array_interface__["data"][0] if self.nbytes else None

    def copy_to(self, begin: int, end: int, out: Bits) -> None:
        """Copies the units from `begin` to before `end`."""
        np.copyto(out, self.bits[begin:end])

    def part(self, begin: int, end: int, room: Callable[[], Bits]) -> Bits:
        """The units from `begin` to before `end`: a view, or a copy in the `room` if they lie nowhere as bits."""
        return self.bits[begin:end]


Weights = Mapping[str, Tensor]


def nbytes_of(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """The error for a value that cannot be read as a tensor."""
    raise CheckpointError(f"tensor {name!r}: {what}", hint=hint)
