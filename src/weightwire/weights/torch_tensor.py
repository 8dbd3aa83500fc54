"""A torch tensor as bits: a view if it is contiguous in CPU memory, else converted while it is copied.

Never imports torch: a caller that passes a torch tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from weightwire.weights.dtypes import BY_ARRAY_NAME, Dtype
from weightwire.weights.tensor import Bits, Tensor, refuse, unit_dtype

__all__ = [
    "LiveTensor",
    "as_torch_integers",
    "is_torch_tensor",
    "note_torch_write",
    "torch_integer_dtype",
    "view_torch_tensor",
]

_PIECE = 1 << 22  # units to cast or to fetch from a device at once


def is_torch_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def view_torch_tensor(name: str, value: Any) -> Tensor:
    """A view of a tensor that is contiguous in CPU memory. Raises for any other."""
    if hasattr(value, "full_tensor"):
        refuse(name, "is sharded over several ranks", "pass full_tensor(), or the rows of to_local()")
    if value.device.type != "cpu" or value.layout != sys.modules["torch"].strided:
        refuse(name, f"has layout {value.layout} on {value.device}", "pass a dense copy: .to_dense().cpu()")
    view = LiveTensor.of(name, value.detach(), tuple(value.shape)).view()
    if view is None:
        refuse(name, "is not contiguous", "pass .resolve_conj().resolve_neg().contiguous()")
    return view


def as_torch_integers(bits: Bits) -> Any:
    """The same memory as a torch tensor of signed integers. torch supports few operations on unsigned ones."""
    signed = bits.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else bits
    return sys.modules["torch"].from_numpy(signed)


def torch_integer_dtype(itemsize: int) -> Any:
    """The dtype of `as_torch_integers`. As integers, NaNs compare like other values."""
    return getattr(sys.modules["torch"], f"int{8 * itemsize}" if itemsize > 1 else "uint8")


def note_torch_write(value: Any) -> None:
    """Informs torch that this tensor was changed in place: autograd must not use values that it saved."""
    if not value.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(value)


class LiveTensor(Tensor):
    """A torch tensor that a trainer keeps changing. It is read, and perhaps cast, when it is copied."""

    _value: Any  # not cast; only the rows of a shard
    _ready: Any  # the event after which the GPU holds these weights

    def __init__(
        self, dtype: Dtype, shape: tuple[int, ...], value: Any, ready: Any = None, rows: tuple[int, int] | None = None
    ) -> None:
        for field, given in {"dtype": dtype, "shape": shape, "rows": rows, "_value": value, "_ready": ready}.items():
            object.__setattr__(self, field, given)

    @classmethod
    def of(
        cls, name: str, value: Any, shape: tuple[int, ...], ready: Any = None, rows: tuple[int, int] | None = None
    ) -> Self:
        """Keeps the dtype. `shape` is the shape of the whole tensor. `value` may hold only some of its `rows`."""
        array_name = str(value.dtype).removeprefix("torch.")
        dtype = BY_ARRAY_NAME.get(array_name)
        if dtype is None or (dtype.packed > 1 and not shape):
            refuse(name, f"unknown dtype {array_name}", "cast it to a dtype of safetensors")
        if dtype.packed > 1:
            shape = (*shape[:-1], dtype.packed * shape[-1])
        return cls(dtype, shape, value, ready, rows)

    def __repr__(self) -> str:
        return f"LiveTensor({self.dtype.name} {list(self.shape)} on {self._value.device})"

    @property
    def bits(self) -> Bits:
        """A copy of all units. Prefer `copy_to`."""
        bits = np.empty(self.count, unit_dtype(self.dtype))
        self.copy_to(0, self.count, bits)
        return bits

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.unit

    @property
    def count(self) -> int:
        return int(self._value.numel())

    @property
    def place(self) -> object:
        value = self._value
        if not self.count:
            return None
        # NumPy views of the same memory must compare equal.
        if self._is_ordered and value.device.type == "cpu":
            return value.data_ptr()
        return value.device, value.data_ptr(), value.stride(), value.is_conj(), value.is_neg()

    @property
    def _is_ordered(self) -> bool:
        """True if memory holds the units in order, without a pending conjugation or negation."""
        return self._value.is_contiguous() and not (self._value.is_conj() or self._value.is_neg())

    @property
    def _is_cast(self) -> bool:
        return self.dtype.is_castable and str(self._value.dtype) != f"torch.{self.dtype.array_name}"

    def cast(self, dtype: Dtype) -> Tensor:
        """The same tensor in another dtype; a view if no conversion is needed."""
        live = LiveTensor(dtype, self.shape, self._value, self._ready, self.rows)
        view = live.view()
        return live if view is None else view

    def view(self) -> Tensor | None:
        """The same memory as plain bits, or None if it must be cast, reordered or fetched from a device."""
        value = self._value
        if self._is_cast or not self._is_ordered or value.device.type != "cpu":
            return None
        bits = value.view(torch_integer_dtype(value.element_size())).numpy().reshape(-1)
        return Tensor(self.dtype, self.shape, bits.view(unit_dtype(self.dtype)), self.rows)

    def copy_to(self, begin: int, end: int, out: Bits) -> None:
        for first in range(begin, end, _PIECE):
            last = min(end, first + _PIECE)
            self._copy_piece(first, last, out[first - begin : last - begin])

    def _copy_piece(self, begin: int, end: int, out: Bits) -> None:
        torch = sys.modules["torch"]
        target = as_torch_integers(out)
        if self._is_cast:
            target = target.view(getattr(torch, self.dtype.array_name))
        with _beside(self._ready, self._value.device) as stream:
            units = self._units(begin, end, target.dtype)
            if stream is not None:
                # Pinned memory, which the device can write to. torch reuses it for the next piece.
                staged = torch.empty(len(units), dtype=target.dtype, device="cpu", pin_memory=True)
                units = staged.copy_(units.to(target.dtype), non_blocking=True)
                stream.synchronize()
        target.copy_(units)

    def _units(self, begin: int, end: int, dtype: Any) -> Any:
        """Some units in order: as integers, or perhaps not yet cast."""
        value = self._value
        if self._is_ordered and value.dim():
            units = value.view(-1)[begin:end]
            return units if self._is_cast else units.view(dtype)
        row = value[0].numel() if value.dim() else 1
        first, last = begin // row, -(-end // row)
        rows = value[first:last] if value.dim() else value
        # Cast before reordering: the cast kernels of torch differ in the NaNs they produce.
        rows = rows.to(dtype) if self._is_cast else rows.resolve_conj().resolve_neg().view(dtype)
        return rows.reshape(-1)[begin - first * row : end - first * row]


@contextmanager
def _beside(ready: Any, device: Any) -> Iterator[Any]:
    """A separate CUDA stream that starts when the weights are ready. None without a GPU."""
    if ready is None:
        yield None
        return
    torch = sys.modules["torch"]
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        yield stream
