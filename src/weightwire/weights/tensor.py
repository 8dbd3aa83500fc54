"""A tensor as bits. Everywhere else weights are a mapping of names to these."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from weightwire.errors import CheckpointError
from weightwire.weights.dtypes import Dtype

__all__ = ["Bits", "HeldWeights", "Rows", "Tensor", "Weights", "nbytes_of", "places_of", "refuse", "unit_dtype"]

_Byte = ctypes.c_char

Bits = npt.NDArray[np.unsignedinteger]
Rows = tuple[int, int]
"""First row, and last row + 1."""


_UNITS: dict[int, np.dtype[np.unsignedinteger]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


def unit_dtype(dtype: Dtype) -> np.dtype[np.unsignedinteger]:
    return _UNITS[dtype.unit]


@dataclass(frozen=True, eq=False, init=False, slots=True)
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
        for name, value in (("dtype", dtype), ("shape", shape), ("bits", bits), ("rows", rows)):
            object.__setattr__(self, name, value)

    @classmethod
    def many(cls, dtypes: Sequence[Dtype], shapes: Sequence[tuple[int, ...]], bits: Sequence[Bits]) -> list[Self]:
        """Whole tensors. Models have 100,000: several times as fast as one by one."""
        made = list(map(cls.__new__, repeat(cls, len(bits))))
        for field, values in zip(_FIELDS, (dtypes, shapes, bits, repeat(None)), strict=True):
            deque(map(field.__set__, made, values), 0)
        return made

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


_FIELDS = [Tensor.__dict__[name] for name in ("dtype", "shape", "bits", "rows")]


def places_of(tensors: Sequence[Tensor]) -> list[object]:
    """The `place` of each."""
    if {*map(type, tensors)} == {Tensor}:
        with suppress(TypeError, ValueError):  # read-only arrays, and empty ones
            bits: list[Any] = [tensor.bits for tensor in tensors]
            return [*map(ctypes.addressof, map(_Byte.from_buffer, bits))]
    return [tensor.place for tensor in tensors]


def address_of(bits: Any) -> int:
    """Where an array begins in memory. It must not be empty."""
    try:
        return ctypes.addressof(_Byte.from_buffer(bits))  # several times as fast, but only for writable arrays
    except TypeError:
        return int(bits.__array_interface__["data"][0])


Weights = Mapping[str, Tensor]


class HeldWeights(Mapping[str, Tensor]):
    """Weights that are tensors already, each with memory of its own. `read_weights` returns them as they are.

    So nobody looks for tied or overlapping tensors in them. Lookups and iteration are as fast as in a dict.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._hold(tensors)

    def _hold(self, tensors: dict[str, Tensor]) -> None:
        """Holds other tensors from now on."""
        self._tensors = tensors
        for derived in ("dtypes", "kinds"):
            self.__dict__.pop(derived, None)

    @cached_property
    def dtypes(self) -> dict[str, Dtype]:
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    @cached_property
    def kinds(self) -> dict[str, tuple[Dtype, tuple[int, ...], Rows | None]]:
        return {name: (tensor.dtype, tensor.shape, tensor.rows) for name, tensor in self._tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()


def nbytes_of(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """Raises the error for a value that cannot be read as a tensor."""
    raise CheckpointError(f"tensor {name!r}: {what}", hint=hint)
