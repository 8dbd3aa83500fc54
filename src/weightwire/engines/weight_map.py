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

from weightwire.errors import EngineError
from weightwire.weights import Dtype, Schema

__all__ = ["Box", "Copy", "Load", "Selection", "WeightMap", "learn", "places_of", "torch_dtype"]

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's own loader: takes names and tensors of a checkpoint, and copies them to where they belong."""

PositionArray = npt.NDArray[np.integer[Any]]

_COPY = torch.ops.aten.copy_.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_OTHER = "it serves another model than the run's, or one that cannot be patched in place"


def torch_dtype(name: str, dtype: Dtype) -> torch.dtype:
    """What torch calls it. A packed dtype has other shapes there, which no model's loader expects."""
    found = getattr(torch, dtype.array_name, None) if dtype.packed == 1 else None
    if found is None:
        raise EngineError(f"tensor {name!r}: torch has no dtype {dtype.name}", hint="serve a model of another dtype")
    return found


# --- views -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Some of a tensor's changes: which of them, and where they go, counted from the target's first unit."""

    chosen: slice | npt.NDArray[np.int64]
    positions: PositionArray


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

    def select(self, positions: PositionArray) -> Selection:
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
class WeightMap:
    """The copies of each checkpoint tensor. Together they fill all parameters of the model, and none twice.

    `odd` are tensors that do not simply lie somewhere, and why: the loader casts or computes them. `placeless` are
    those that the loader has no use for, or puts where it has put another one: they must be the same as another tensor.
    """

    copies: Mapping[str, tuple[Copy, ...]]
    odd: Mapping[str, str]
    placeless: frozenset[str]
    places: Places


Places = tuple[tuple[object, ...], ...]


def places_of(model: torch.nn.Module) -> Places:
    """Where a model's weights are: what is learnt holds for as long as that stays the same."""
    return tuple(
        (name, _storage(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        for name, tensor in _tensors_of(model).items()
    )


# --- learning ----------------------------------------------------------------------------------------------------


def learn(model: torch.nn.Module, load: Load, schema: Schema) -> WeightMap:
    """Runs a model's loader without loading anything. The model is as it was, whatever happens."""
    before, places = _tensors_of(model), places_of(model)
    data = {name: tensor.data for name, tensor in before.items()}
    recorder = _Recorder(before.values())
    try:
        with torch.no_grad(), recorder:
            load(recorder.sources(schema))
    except EngineError:
        raise
    except Exception as problem:
        where = f" (at tensor {recorder.at!r})" if recorder.at else ""
        reason = f"{type(problem).__name__}: {_first_line(problem)}"
        raise EngineError(
            f"the model's loader does not take this checkpoint{where}: {reason}",
            hint="names, shapes and layout must be those that the model was started with",
        ) from problem
    finally:
        replaced = _put_back(model, before, data)
    if replaced or places_of(model) != places:
        raise EngineError(
            f"parameter {replaced!r}: the model's loader puts a new one in its place",
            hint="its layout cannot be patched in place",
        )
    return recorder.map(model, schema, places)


def _first_line(problem: Exception) -> str:
    return str(problem).split("\n")[0][:300]


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return {**found, **dict(model.named_buffers(remove_duplicate=False))}


def _put_back(model: torch.nn.Module, before: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor]) -> str:
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
        if _storage(tensor) != _storage(data[name]) or tensor.data_ptr() != data[name].data_ptr():
            replaced = replaced or name
            tensor.data = data[name]
    return replaced


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes the copies into a model's memory, and makes none of them.

    What is computed from a source that holds nothing is nothing too; that it came from there is remembered. Whatever
    else would write to the model's memory is refused: what comes of it cannot be told.
    """

    def __init__(self, memory: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.at = ""  # the tensor that the loader was given last
        self._memory = {_storage(tensor) for tensor in memory}
        self._names: dict[int, str] = {}  # of sources, by storage
        self._derived: dict[int, set[str]] = {}
        self._kept: list[torch.Tensor] = []  # lest their storages be used again for something else
        self._copies: dict[str, list[Copy]] = {}
        self._constants: list[torch.Tensor] = []  # what is filled with something that is in no checkpoint
        self._odd: dict[str, str] = {}
        self._odd_targets: list[torch.Tensor] = []

    def sources(self, schema: Schema) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in schema.items():
            self.at = name
            # Never written to, so that it takes no memory.
            source = torch.empty(shape, dtype=torch_dtype(name, dtype), device="cpu")
            self._names[_storage(source)] = name
            self._kept.append(source)
            yield name, source

    def map(self, model: torch.nn.Module, schema: Schema, places: Places) -> WeightMap:
        for name in self._odd:
            self._odd_targets += [copy.target_view for copy in self._copies.pop(name, ())]
        copies: dict[str, tuple[Copy, ...]] = {}
        taken: set[frozenset[tuple[int, Box]]] = set()
        for name in schema:
            found = tuple(self._copies.get(name, ()))
            place = frozenset((_storage(copy.target), copy.box) for copy in found)
            if found and place not in taken:  # else tied: one of them is enough, where they are the same
                copies[name] = found
                taken.add(place)
        placeless = frozenset(name for name in schema if name not in copies and name not in self._odd)
        self._check_cover(model, [copy for several in copies.values() for copy in several])
        return WeightMap(copies, self._odd, placeless, places)

    def _check_cover(self, model: torch.nn.Module, copies: Iterable[Copy]) -> None:
        """That all parameters are filled, and no weight twice: else what is served would be a mixture."""
        views: dict[int, list[torch.Tensor]] = {}
        for copy in copies:
            views.setdefault(_storage(copy.target), []).append(copy.target_view)
        others: dict[int, list[torch.Tensor]] = {}
        for view in (*self._constants, *self._odd_targets):
            others.setdefault(_storage(view), []).append(view)
        for name, parameter in model.named_parameters():
            storage = _storage(parameter)
            count = parameter.untyped_storage().nbytes() // parameter.element_size()
            times = torch.zeros(count, dtype=torch.uint8)
            for view in views.get(storage, ()):
                times.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
            if bool((times > 1).any()):
                raise EngineError(f"parameter {name!r}: the model's loader writes some of it twice", hint=_OTHER)
            for view in others.get(storage, ()):
                times.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
            if not bool(times.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset()).all()):
                raise EngineError(f"parameter {name!r}: the run has no weights for all of it", hint=_OTHER)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and self._is_ours(args[0]):
            self._note(args[0], args[1])
            return args[0]
        written = [tensor for tensor in _written(func, args, kwargs) if self._is_ours(tensor)]
        if written:
            return self._note_write(func, args, written)
        if func is _ITEM and (names := self._origins(args)):
            for name in names:
                self._odd[name] = "the loader looks at it"
        result = func(*args, **kwargs)
        self._trace((*args, *kwargs.values()), result)
        return result

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._memory

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names.get(_storage(source))
        if name is None:
            for origin in (origins := self._origins((source,))):
                self._odd[origin] = "the loader computes it"
            (self._odd_targets if origins else self._constants).append(target.detach())
        elif source.dtype != target.dtype:
            self._find_odd(name, f"the loader casts it to {str(target.dtype).removeprefix('torch.')}", target)
        elif source.shape != target.shape:
            source.expand(target.shape)  # raises where the copy would
            self._find_odd(name, "the loader repeats it", target)
        else:
            box = Box.of(source, target)
            if not box.is_nested:
                self._find_odd(name, "the loader repeats it", target)
            else:
                self._copies.setdefault(name, []).append(Copy(box, target.detach()))

    def _find_odd(self, name: str, why: str, target: torch.Tensor) -> None:
        self._odd[name] = why
        self._odd_targets.append(target.detach())

    def _note_write(self, func: Any, args: tuple[Any, ...], written: list[torch.Tensor]) -> Any:
        """Nothing is written: of constants that is all there is to it, of weights they are odd."""
        if len(written) > 1 or not args or args[0] is not written[0]:
            raise EngineError(f"the model's loader writes to its weights with {func}", hint=_OTHER)
        origins = self._origins(args[1:])
        for name in origins:
            self._odd[name] = f"the loader writes it with {func}"
        (self._odd_targets if origins else self._constants).append(written[0].detach())
        return written[0]

    def _origins(self, values: Iterable[Any]) -> set[str]:
        """The sources that these are, or came from."""
        found: set[str] = set()
        for value in _flat(values):
            storage = _storage(value)
            found |= {self._names[storage]} if storage in self._names else self._derived.get(storage, set())
        return found

    def _trace(self, args: Iterable[Any], result: Any) -> None:
        came = self._origins(args)
        if not came:
            return
        for value in _flat((result,)):
            if _storage(value) not in self._names:
                self._derived.setdefault(_storage(value), set()).update(came)
                self._kept.append(value)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _flat((given,))


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
