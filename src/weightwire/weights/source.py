"""Reads weights from files, checkpoint directories, NumPy arrays, torch tensors and raw buffers.

Nothing is copied: the result is views, as named flat arrays of bits. `present` converts back.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weightwire.errors import CheckpointError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.dtypes import BY_ARRAY_NAME, DTYPES, Dtype
from weightwire.weights.safetensors_file import MAX_DIMS, MAX_INT, METADATA, is_unicode
from weightwire.weights.tensor import HeldWeights, Tensor, Weights, refuse, unit_dtype
from weightwire.weights.torch_tensor import as_torch_integers, is_torch_tensor, note_torch_write, view_torch_tensor

__all__ = ["HasStateDict", "check_name", "mark_changed", "present", "read_weights"]


class HasStateDict(Protocol):
    """A torch module, or anything else that can list its weights."""

    def state_dict(self) -> Mapping[str, Any]: ...


def read_weights(source: str | os.PathLike[str] | Mapping[str, Any] | HasStateDict) -> Weights:
    """Weights from a safetensors file, a checkpoint directory, or a mapping of names to tensors.

    A mapping's values may be NumPy arrays, torch tensors on the CPU, `Tensor`s, or
    `(dtype name, shape, buffer)`. Nothing is copied: writing to the result changes the source.
    """
    if isinstance(source, str | os.PathLike):
        return Checkpoint(source)
    if isinstance(source, Checkpoint | HeldWeights):
        return source
    mapping = source if isinstance(source, Mapping) else _state_dict(source)
    names, values = [*mapping], [*mapping.values()]
    if read := _read_plain_arrays(names, values):
        return read
    pairs = zip(names, values, strict=True)
    return {check_name(name): _read_plain_array(value) or _read_tensor(name, value) for name, value in pairs}


# From memory


def _state_dict(source: Any) -> Mapping[str, Any]:
    if not callable(getattr(source, "state_dict", None)):
        raise CheckpointError(
            f"weights cannot be read from {type(source).__name__}",
            hint="pass a path, a mapping of names to tensors, or something with a state_dict()",
        )
    mapping: Mapping[str, Any] = source.state_dict()
    return mapping


def check_name(name: Any) -> str:
    """Returns the name, or raises if safetensors cannot store it."""
    if not isinstance(name, str) or name == METADATA or not is_unicode(name):
        raise CheckpointError(f"{name!r} is not a valid tensor name", hint=f"use any Unicode text except {METADATA}")
    return name


def _read_plain_array(value: Any) -> Tensor | None:
    """The usual case, in a short way: models have 100,000 tensors. None for any other value."""
    if type(value) is np.ndarray:
        array, kind = value, _kind_of_array(value.dtype, value.shape)
    elif type(value) is tuple and len(value) == 3 and type(value[2]) is np.ndarray and type(value[1]) is tuple:
        plain = type(value[0]) is str and _are_integers(value[1])
        array, kind = value[2], _kind_of_buffer(value[0], value[1]) if plain else None
    else:
        return None
    if kind is None or array.nbytes != kind.nbytes or not array.flags.c_contiguous:
        return None
    flat = array.ravel()
    return Tensor(kind.dtype, kind.shape, flat if array.dtype is kind.units else flat.view(kind.units))


def _read_plain_arrays(names: list[Any], values: list[Any]) -> dict[str, Tensor] | None:
    """The same for all tensors at once, several times as fast. None if any of them needs a closer look.

    Makes no tuple per tensor: 100,000 new containers would start the garbage collector.
    """
    if {*map(type, names)} != {str} or not "".join(names).isascii() or METADATA in names:
        return None
    kinds, arrays = _columns(values)
    if not kinds or None in kinds or {array.flags.c_contiguous for array in arrays} != {True}:
        return None
    if [array.nbytes for array in arrays] != [kind.nbytes for kind in kinds]:
        return None
    flat = [array.ravel() for array in arrays]
    bits = [one if one.dtype is kind.units else one.view(kind.units) for one, kind in zip(flat, kinds, strict=True)]
    made = Tensor.many([kind.dtype for kind in kinds], [kind.shape for kind in kinds], bits)
    return dict(zip(names, made, strict=True))


def _columns(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """The kinds and arrays of plain arrays or buffers. Nothing if one value is something else."""
    if {*map(type, values)} == {np.ndarray}:
        return [*map(_kind_of_array, [one.dtype for one in values], [one.shape for one in values])], values
    if {*map(type, values)} != {tuple} or {*map(len, values)} != {3}:
        return [], []
    names, shapes, arrays = ([one[k] for one in values] for k in range(3))
    if {*map(type, names)} != {str} or {*map(type, shapes)} != {tuple} or {*map(type, arrays)} != {np.ndarray}:
        return [], []
    if not _are_integers(chain.from_iterable(shapes)):
        return [], []
    return [*map(_kind_of_buffer, names, shapes)], arrays


def _are_integers(sizes: Iterable[Any]) -> bool:
    """Ask before a shape is a key of a cache, where 2.0 and 2 are the same, and a list is an error."""
    return {*map(type, sizes)} == {int}


class _SourceKind(NamedTuple):
    """A dtype and shape that need no further check."""

    dtype: Dtype
    shape: tuple[int, ...]
    nbytes: int
    units: np.dtype[np.unsignedinteger]


@lru_cache(4096)
def _kind_of_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> _SourceKind | None:
    known = BY_ARRAY_NAME.get(dtype.name)
    return None if known is None or dtype.str.startswith(">") else _kind_of_buffer(known.name, shape)


@lru_cache(4096)
def _kind_of_buffer(dtype_name: str, shape: tuple[int, ...]) -> _SourceKind | None:
    dtype = DTYPES.get(dtype_name)
    if dtype is None or not shape or len(shape) > MAX_DIMS:
        return None
    nbytes = dtype.nbytes(shape) if 0 < min(shape) <= max(shape) <= MAX_INT else None
    return None if nbytes is None else _SourceKind(dtype, shape, nbytes, unit_dtype(dtype))


def _read_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if _is_plain(value):
            return value
        return _read_shard(name, value) if value.rows else _view(name, value.dtype, value.shape, value.bits)
    if isinstance(value, np.ndarray):
        return _view(name, _known_dtype(name, value.dtype.name), value.shape, value)
    if is_torch_tensor(value):
        return view_torch_tensor(name, value)
    if isinstance(value, tuple) and len(value) == 3:
        return _read_buffer(name, *value)
    refuse(
        name,
        f"has type {type(value).__name__}",
        "pass NumPy arrays, torch tensors or (dtype name, shape, buffer) tuples",
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is as `_view` would return it. Quick, because there may be 100,000."""
    bits, dtype = tensor.bits, tensor.dtype
    return (
        type(bits) is np.ndarray
        and bits.dtype == unit_dtype(dtype)
        and bits.ndim == 1
        and tensor.rows is None
        and bits.flags.c_contiguous
        and len(tensor.shape) <= MAX_DIMS
        and min(tensor.shape, default=0) >= 0
        and bits.nbytes == dtype.nbytes(tensor.shape)
    )


def _read_shard(name: str, shard: Tensor) -> Tensor:
    first, last = shard.rows or (0, 0)
    if not (shard.shape and 0 <= first < last <= shard.shape[0]):
        refuse(name, f"{list(shard.shape)} does not have rows {first} to {last}", "pass rows=(first, last + 1)")
    if shard.dtype.nbytes(shard.shape[1:]) is None:
        refuse(name, "its rows end inside a byte", "pass the whole tensor")
    covered = _view(name, shard.dtype, (last - first, *shard.shape[1:]), shard.bits)
    return Tensor(shard.dtype, shard.shape, covered.bits, shard.rows)


def _read_buffer(name: str, dtype_name: Any, shape: Any, buffer: Any) -> Tensor:
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        refuse(name, f"unknown dtype {dtype_name!r}", f"use one of {', '.join(DTYPES)}")
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        refuse(name, f"{shape!r} is not a shape", "pass (dtype name, shape, buffer)")
    try:
        array = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as problem:
        refuse(name, f"has no contiguous buffer ({problem})", "pass bytes or a contiguous memoryview")
    return _view(name, dtype, sizes, array)


def _known_dtype(name: str, array_name: str) -> Dtype:
    dtype = BY_ARRAY_NAME.get(array_name)
    if dtype is None:
        refuse(name, f"unknown dtype {array_name}", f"use one of {', '.join(BY_ARRAY_NAME)}")
    return dtype


def _view(name: str, dtype: Dtype, shape: tuple[int, ...], array: npt.NDArray[Any]) -> Tensor:
    """Views an array as a tensor of this dtype and shape. The array may have another dtype."""
    if not array.flags.c_contiguous:
        refuse(name, "is not contiguous", "pass numpy.ascontiguousarray(array)")
    if array.dtype.str.startswith(">"):
        refuse(name, "is big-endian", "pass a little-endian copy: .astype(array.dtype.newbyteorder('<'))")
    if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_INT:
        refuse(name, f"{list(shape)!r:.60}... is not a possible shape", f"use at most {MAX_DIMS} dimensions")
    if min(shape, default=0) < 0 or array.nbytes != dtype.nbytes(shape):
        refuse(
            name,
            f"{dtype.name} {list(shape)} does not fit a buffer of {array.nbytes:,} bytes",
            "check its dtype, shape and buffer",
        )
    # asarray drops subclasses (masked arrays, memory maps), which behave differently.
    return Tensor(dtype, shape, np.asarray(array).reshape(-1).view(unit_dtype(dtype)))


def mark_changed(source: Any, name: str) -> None:
    """Informs torch that a tensor of this source was changed in place."""
    value = source.get(name) if isinstance(source, Mapping) else None
    if is_torch_tensor(value):
        note_torch_write(value)


def present(tensor: Tensor, like: Any = None) -> Any:
    """Converts a tensor to the type of `like`, without a copy. Reverses `read_weights`.

    If `like` is None or has another dtype or shape, the result is a NumPy array if NumPy knows the dtype.
    """
    if like is not None and not _is_same_kind(tensor, like):
        like = None
    if is_torch_tensor(like):
        return as_torch_integers(tensor.bits).view(like.dtype).reshape(like.shape)
    if isinstance(like, np.ndarray):
        return tensor.bits.view(like.dtype).reshape(like.shape)
    if isinstance(like, tuple):
        return tensor.dtype.name, tensor.shape, tensor.bits.view(np.uint8).data
    if like is None and tensor.rows is None and tensor.dtype.array_name in np.sctypeDict:
        return tensor.bits.view(tensor.dtype.array_name).reshape(tensor.shape)
    return tensor


def _is_same_kind(tensor: Tensor, like: Any) -> bool:
    other = _read_tensor("", like)
    return (tensor.dtype, tensor.shape, tensor.rows) == (other.dtype, other.shape, other.rows)
