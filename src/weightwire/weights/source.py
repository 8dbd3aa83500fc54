"""1 read: weights from files or from memory, as named flat arrays of bits.

Knows safetensors files, Hugging Face checkpoint directories, NumPy arrays, torch tensors and raw buffers, and
copies none of them: what it returns are views. torch is never imported; whoever hands us a torch tensor has
done that already. Writes nothing, and does not know what a delta is.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from weightwire.errors import CheckpointError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.dtypes import DTYPES, Dtype
from weightwire.weights.safetensors_file import MAX_DIMS, MAX_INT, METADATA, is_unicode
from weightwire.weights.tensor import Tensor, Weights, unit_dtype

__all__ = [
    "HasStateDict",
    "check_name",
    "dtype_called",
    "mark_changed",
    "present",
    "read_weights",
]

# What NumPy (with ml_dtypes) and torch both call the dtypes of safetensors.
_BY_ARRAY_NAME = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
# torch has one dtype that packs two elements into a byte. It counts bytes where safetensors counts elements.
_TORCH_F4 = "float4_e2m1fn_x2"


class HasStateDict(Protocol):
    """A torch module, or anything else that can list its weights."""

    def state_dict(self) -> Mapping[str, Any]: ...


def read_weights(source: str | os.PathLike[str] | Mapping[str, Any] | HasStateDict) -> Weights:
    """Weights from a safetensors file, a checkpoint directory, or a mapping of names to tensors.

    A mapping's values may be NumPy arrays, torch tensors on the CPU, `Tensor`s, or
    `(dtype name, shape, buffer)`. Nothing is copied: to change the result is to change the source.
    """
    if isinstance(source, str | os.PathLike):
        return Checkpoint(source)
    if isinstance(source, Checkpoint):
        return source
    mapping = source if isinstance(source, Mapping) else _state_dict(source)
    return {check_name(name): _read_tensor(name, value) for name, value in mapping.items()}


# From memory


def _state_dict(source: Any) -> Mapping[str, Any]:
    if not callable(getattr(source, "state_dict", None)):
        raise CheckpointError(
            f"weights cannot be read from a {type(source).__name__}",
            hint="pass a path, a mapping of names to tensors, or something with a state_dict()",
        )
    mapping: Mapping[str, Any] = source.state_dict()
    return mapping


def check_name(name: Any) -> str:
    """A tensor's name, if it can be one."""
    if not isinstance(name, str) or name == METADATA or not is_unicode(name):
        raise CheckpointError(
            f"{name!r} cannot be a tensor's name",
            hint=f"safetensors takes any valid Unicode text but {METADATA}",
        )
    return name


def _read_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _read_shard(name, value) if value.rows else _view(name, value.dtype, value.shape, value.bits)
    if isinstance(value, np.ndarray):
        return _view(name, _known_dtype(name, value.dtype.name), value.shape, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_torch(name, value, torch)
    if isinstance(value, tuple) and len(value) == 3:
        return _read_buffer(name, *value)
    _fail(
        name,
        f"is a {type(value).__name__}",
        "pass NumPy arrays, torch tensors or (dtype name, shape, buffer) tuples",
    )


def _read_shard(name: str, shard: Tensor) -> Tensor:
    first, last = shard.rows or (0, 0)
    if not (shard.shape and 0 <= first < last <= shard.shape[0]):
        _fail(name, f"{list(shard.shape)} has no rows {first} to {last}", "rows are (first, last + 1)")
    if shard.dtype.nbytes(shard.shape[1:]) is None:
        _fail(name, "its rows end inside a byte", "pass the whole tensor")
    covered = _view(name, shard.dtype, (last - first, *shard.shape[1:]), shard.bits)
    return Tensor(shard.dtype, shard.shape, covered.bits, shard.rows)


def _read_torch(name: str, value: Any, torch: Any) -> Tensor:
    if hasattr(value, "full_tensor"):
        _fail(name, "is sharded over several ranks", "pass its full_tensor(), or the rows of to_local()")
    if value.device.type != "cpu" or value.layout != torch.strided:
        _fail(name, f"is a {value.layout} tensor on {value.device}", "pass a dense copy: .to_dense().cpu()")
    # Conjugation and negation may be flags that the bits in memory do not show.
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        _fail(name, "is not contiguous", "pass .resolve_conj().resolve_neg().contiguous()")
    dtype_name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if dtype_name == _TORCH_F4 and shape:
        dtype, shape = DTYPES["F4"], (*shape[:-1], 2 * shape[-1])
    else:
        dtype = _known_dtype(name, dtype_name)
    # NumPy has no bfloat16 or float8: pass through an integer dtype of the same width.
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return _view(name, dtype, shape, value.detach().view(same_width).numpy())


def _read_buffer(name: str, dtype_name: Any, shape: Any, buffer: Any) -> Tensor:
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        _fail(name, f"unknown dtype {dtype_name!r}", f"known are {', '.join(DTYPES)}")
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        _fail(name, f"{shape!r} is no shape", "pass (dtype name, shape, buffer)")
    try:
        array = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as problem:
        _fail(name, f"has no contiguous buffer ({problem})", "pass bytes, or a contiguous memoryview of them")
    return _view(name, dtype, sizes, array)


def dtype_called(array_name: str) -> Dtype | None:
    """The dtype that NumPy and torch call so."""
    return DTYPES.get(_BY_ARRAY_NAME.get(array_name, ""))


def _known_dtype(name: str, array_name: str) -> Dtype:
    dtype = dtype_called(array_name)
    if dtype is None:
        _fail(name, f"unknown dtype {array_name}", f"known are {', '.join(_BY_ARRAY_NAME)}")
    return dtype


def _view(name: str, dtype: Dtype, shape: tuple[int, ...], array: npt.NDArray[Any]) -> Tensor:
    """The bits of an array, whatever its own dtype is."""
    if not array.flags.c_contiguous:
        _fail(name, "is not contiguous", "pass numpy.ascontiguousarray(...) of it")
    if array.dtype.str.startswith(">"):
        _fail(name, "is big-endian", "pass a little-endian copy: .astype(array.dtype.newbyteorder('<'))")
    if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_INT:
        _fail(name, f"{list(shape)!r:.80} is no possible shape", f"at most {MAX_DIMS} dimensions of 63 bits")
    if min(shape, default=0) < 0 or array.nbytes != dtype.nbytes(shape):
        _fail(
            name,
            f"{dtype.name} {list(shape)} does not take {array.nbytes:,} bytes",
            "its dtype, its shape or its buffer is not what it should be",
        )
    # asarray drops subclasses (masked arrays, memory maps) that behave differently from plain arrays.
    return Tensor(dtype, shape, np.asarray(array).reshape(-1).view(unit_dtype(dtype)))


def _fail(name: str, what: str, hint: str) -> NoReturn:
    raise CheckpointError(f"tensor {name!r}: {what}", hint=hint)


def mark_changed(source: Any, name: str) -> None:
    """Tells torch that a tensor was written to behind its back: autograd must not use what it saved of it."""
    torch = sys.modules.get("torch")
    value = source.get(name) if isinstance(source, Mapping) else None
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_inference():
        torch.autograd.graph.increment_version(value)


def present(tensor: Tensor, like: Any = None) -> Any:
    """A tensor as the kind of thing that `like` is: the way back from `read_weights`, and no copy either.

    Without something of the same dtype and shape to go by, it becomes a NumPy array where NumPy has its dtype.
    """
    if like is not None and not _is_same_kind(tensor, like):
        like = None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        signed = tensor.bits.view(f"<i{tensor.dtype.unit}") if tensor.dtype.unit > 1 else tensor.bits
        return torch.from_numpy(signed).view(like.dtype).reshape(like.shape)
    if isinstance(like, np.ndarray):
        return tensor.bits.view(like.dtype).reshape(like.shape)
    if isinstance(like, tuple):
        return tensor.dtype.name, tensor.shape, tensor.bits.view(np.uint8).data
    array_name = next((array for array, name in _BY_ARRAY_NAME.items() if name == tensor.dtype.name), "")
    if like is None and tensor.rows is None and array_name in np.sctypeDict:
        return tensor.bits.view(array_name).reshape(tensor.shape)
    return tensor


def _is_same_kind(tensor: Tensor, like: Any) -> bool:
    other = _read_tensor("", like)
    return (tensor.dtype, tensor.shape, tensor.rows) == (other.dtype, other.shape, other.rows)
