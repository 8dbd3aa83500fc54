"""Where each weight of a checkpoint lies in a running model, learnt from the model's own loader.

The loader is run once with tensors that hold nothing, while every copy that it makes is noted instead of made: which
units of which checkpoint tensor would go to which units of the model's memory. Fused parameters, slices of tensor
parallel ranks and tied weights are then all the same. Knows torch and views; no patch, and no digest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightwire.checkpoint import Schema
from weightwire.dtypes import Dtype
from weightwire.errors import EngineError

__all__ = ["Box", "Copy", "Map", "Selection", "learn", "torch_dtype"]

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's own loader: takes names and tensors of a checkpoint, and copies them to where they belong."""

Positions = npt.NDArray[np.integer[Any]]

_TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
_COPY = torch.ops.aten.copy_.default


def torch_dtype(name: str, dtype: Dtype) -> torch.dtype:
    if dtype.name not in _TORCH:
        raise EngineError(f"tensor {name!r}: torch has no dtype {dtype.name}", hint="serve a model of another dtype")
    return _TORCH[dtype.name]


# --- views -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Some of a tensor's changes: which of them, and where they go, counted from the target's first unit."""

    chosen: slice | npt.NDArray[np.int64]
    positions: Positions


@dataclass(frozen=True)
class Box:
    """The same units twice: at `start` with `strides` in a checkpoint tensor, and in a model's storage.

    Dimensions go from the largest stride in the checkpoint tensor to the smallest; those that run on in both are one.
    """

    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    target_start: int
    target_strides: tuple[int, ...]

    @staticmethod
    def of(source: torch.Tensor, target: torch.Tensor) -> Box:
        dims = [
            (size, *strides)
            for size, *strides in zip(source.shape, source.stride(), target.stride(), strict=True)
            if size > 1
        ]
        joined: list[tuple[int, int, int]] = []
        for size, stride, target_stride in sorted(dims, key=lambda dim: -dim[1]):
            if joined and joined[-1][1:] == (size * stride, size * target_stride):
                size *= joined.pop()[0]
            joined.append((size, stride, target_stride))
        return Box(
            tuple(dim[0] for dim in joined) if source.numel() else (0,),
            source.storage_offset(),
            tuple(dim[1] for dim in joined) if source.numel() else (1,),
            target.storage_offset(),
            tuple(dim[2] for dim in joined) if source.numel() else (1,),
        )

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """That it is one piece on both sides."""
        return not self.shape or (self.strides == (1,) and self.target_strides == (1,))

    @property
    def is_nested(self) -> bool:
        """That a position tells its coordinates: strides are those of slices of a whole tensor."""
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride < reach:
                return False
            reach = stride * size
        return True

    def select(self, positions: Positions) -> Selection:
        """Of ascending positions in the checkpoint tensor, those in this box."""
        if self.is_run:
            first, last = np.searchsorted(positions, [self.start, self.start + self.count])
            return Selection(slice(int(first), int(last)), positions[first:last] - positions.dtype.type(self.start))
        rest = positions.astype(np.int64) - self.start
        inside = rest >= 0
        target = np.zeros(len(rest), np.int64)
        for size, stride, target_stride in zip(self.shape, self.strides, self.target_strides, strict=True):
            at, rest = np.divmod(rest, stride)
            inside &= at < size
            target += at * target_stride
        inside &= rest == 0
        chosen = np.flatnonzero(inside)
        return Selection(chosen, target[chosen])


@dataclass(frozen=True)
class Copy:
    """One copy that the loader makes, of a checkpoint tensor's units into a view of the model's memory."""

    box: Box
    target: torch.Tensor

    def source_in(self, whole: torch.Tensor) -> torch.Tensor:
        """What is copied, out of the flat checkpoint tensor."""
        return whole.as_strided(self.box.shape, self.box.strides, self.box.start)

    @property
    def target_view(self) -> torch.Tensor:
        """Where it goes, in the same shape."""
        return self.target.as_strided(self.box.shape, self.box.target_strides, self.box.target_start)


@dataclass(frozen=True)
class Map:
    """The copies of each checkpoint tensor; none where the model has no use for it (or another rank has).

    `odd` are those that do not simply lie somewhere, and why: the loader casts or computes them.
    """

    copies: Mapping[str, tuple[Copy, ...]]
    odd: Mapping[str, str]


# --- learning ----------------------------------------------------------------------------------------------------


def learn(model: torch.nn.Module, load: Load, schema: Schema) -> Map:
    """Runs a model's loader without loading anything. The model is as it was, whatever happens."""
    before = _tensors_of(model)
    recorder = _Recorder(before.values())
    try:
        with torch.no_grad(), recorder:
            load(recorder.sources(schema))
    except EngineError:
        raise
    except Exception as problem:
        where = f" (at tensor {recorder.at!r})" if recorder.at else ""
        raise EngineError(
            f"the model's loader does not take this checkpoint{where}: {type(problem).__name__}: {problem}",
            hint="names, shapes and layout must be those that the model was started with",
        ) from problem
    finally:
        replaced = _put_back(model, before)
    if replaced:
        raise EngineError(
            f"parameter {replaced!r}: the model's loader puts a new one in its place",
            hint="its layout cannot be patched in place",
        )
    return recorder.map(schema)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return {**found, **dict(model.named_buffers(remove_duplicate=False))}


def _put_back(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> str:
    """Undoes what the loader did by assignment; returns the first name that it did it to."""
    replaced = ""
    now = _tensors_of(model)
    for name, tensor in before.items():
        if now.get(name) is not tensor:
            replaced = replaced or name
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            table = module._parameters if isinstance(tensor, torch.nn.Parameter) else module._buffers
            table[attribute] = tensor
    return replaced


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes the copies into a model's memory, and makes none of them.

    What is computed from a source that holds nothing is nothing too; that it came from there is remembered.
    """

    def __init__(self, memory: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.at = ""  # the tensor that the loader was given last
        self._memory = {_storage(tensor) for tensor in memory}
        self._names: dict[int, str] = {}  # of sources, by storage
        self._derived: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # lest their storages be used again for something else
        self._copies: dict[str, list[Copy]] = {}
        self._odd: dict[str, str] = {}

    def sources(self, schema: Schema) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in schema.items():
            self.at = name
            # Never written to, so that it takes no memory.
            source = torch.empty(shape, dtype=torch_dtype(name, dtype), device="cpu")
            self._names[_storage(source)] = name
            self._kept.append(source)
            yield name, source

    def map(self, schema: Schema) -> Map:
        copies = {name: tuple(self._copies.get(name, ())) for name in schema if name not in self._odd}
        return Map(copies, self._odd)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and _storage(args[0]) in self._memory:
            self._note(args[0], args[1])
            return args[0]
        if any(argument.is_write for argument in map(_alias, func._schema.arguments) if argument):
            written = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if written is not None and _storage(written) in self._memory:
                self._note_odd_write(func, args)
                return written
        result = func(*args, **kwargs)
        self._trace(args, result)
        return result

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        storage = _storage(source)
        name = self._names.get(storage)
        if name is None:
            if storage in self._derived:
                self._odd[self._derived[storage]] = "the loader computes it"
            return  # a constant, such as the zeros behind the last row
        if source.dtype != target.dtype:
            self._odd[name] = f"the loader casts it to {str(target.dtype).removeprefix('torch.')}"
        elif source.shape != target.shape:
            source.expand(target.shape)  # raises where the copy would
            self._odd[name] = "the loader repeats it"
        else:
            box = Box.of(source, target)
            if not box.is_nested:
                self._odd[name] = "the loader repeats it"
            else:
                self._copies.setdefault(name, []).append(Copy(box, target.detach()))

    def _note_odd_write(self, func: Any, args: tuple[Any, ...]) -> None:
        for value in args[1:]:
            if isinstance(value, torch.Tensor):
                name = self._names.get(_storage(value)) or self._derived.get(_storage(value))
                if name is not None:
                    self._odd[name] = f"the loader writes it with {func}"

    def _trace(self, args: tuple[Any, ...], result: Any) -> None:
        came = [
            name
            for value in _flat(args)
            if (name := self._names.get(_storage(value)) or self._derived.get(_storage(value)))
        ]
        if not came:
            return
        for value in _flat((result,)):
            if _storage(value) not in self._names:
                self._derived[_storage(value)] = came[0]
                self._kept.append(value)


def _alias(argument: Any) -> Any:
    return argument.alias_info


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
