"""Where each checkpoint tensor lies in a running model, learned from the model's own loader.

Runs the loader once with empty tensors, and records every copy instead of making it: which units of which checkpoint
tensor go to which units of the model's memory. This covers fused parameters, slices of tensor parallel ranks and tied
weights alike.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightwire.engines.box import Box
from weightwire.errors import EngineError, first_line
from weightwire.weights import Dtype, Schema

__all__ = [
    "Copy",
    "Load",
    "Unpatchable",
    "UnpatchableKind",
    "WeightMap",
    "learn",
    "places_of",
    "storage_of",
    "tensors_of",
    "torch_dtype",
]

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's own loader: takes names and tensors of a checkpoint, and copies them into the model."""

_COPY = torch.ops.aten.copy_.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_OTHER = "serve the same model as the run, with a layout that can be patched in place"


def torch_dtype(name: str, dtype: Dtype) -> torch.dtype:
    """The torch dtype. Packed dtypes have other shapes in torch, which no model's loader expects."""
    found = getattr(torch, dtype.array_name, None) if dtype.packed == 1 else None
    if found is None:
        raise EngineError(f"tensor {name!r}: torch has no dtype {dtype.name}", hint="serve a model of another dtype")
    return found


# --- views -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """One copy by the loader, from a checkpoint tensor to a view of the model's memory."""

    box: Box
    target: torch.Tensor
    is_widened: bool = False  # bfloat16 in the checkpoint, float32 in the model

    def source_in(self, whole: torch.Tensor) -> torch.Tensor:
        """The copied units of the flat checkpoint tensor, as integers of the model's width."""
        units = whole.as_strided(self.box.shape, self.box.strides, self.box.start)
        return units.to(torch.int32) << 16 if self.is_widened else units

    @property
    def target_view(self) -> torch.Tensor:
        """The target, in the same shape as `source_in`."""
        return self.target.as_strided(self.box.shape, self.box.target_strides, self.box.target_start)


class UnpatchableKind(enum.Enum):
    CAST = enum.auto()
    COMPUTED = enum.auto()
    READ = enum.auto()
    REPEATED = enum.auto()
    WRITTEN = enum.auto()


@dataclass(frozen=True)
class Unpatchable:
    """Why a tensor cannot be patched in place."""

    kind: UnpatchableKind
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class WeightMap:
    """The copies of each checkpoint tensor. Together they fill every parameter of the model exactly once.

    `unpatchable` tensors are not plain copies, because the loader casts or computes them. Each has its reason.
    `unused` tensors are unused by the loader or share the place of another tensor. Each must equal another tensor.
    """

    copies: Mapping[str, tuple[Copy, ...]]
    unpatchable: Mapping[str, Unpatchable]
    unused: frozenset[str]
    places: Places
    other_targets: tuple[torch.Tensor, ...] = ()  # of `unpatchable` tensors


Places = tuple[tuple[object, ...], ...]

_REPEATED = Unpatchable(UnpatchableKind.REPEATED, "the loader repeats it")


def places_of(model: torch.nn.Module) -> Places:
    """The addresses of a model's weights. A WeightMap is valid as long as they do not change."""
    return tuple(
        (name, storage_of(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        for name, tensor in tensors_of(model).items()
    )


# --- learning ----------------------------------------------------------------------------------------------------


def learn(
    model: torch.nn.Module,
    load: Load,
    schema: Schema,
    guarded: Iterable[torch.Tensor] = (),
    optional: Iterable[torch.Tensor] = (),
) -> WeightMap:
    """Runs a model's loader without loading anything. Always leaves the model unchanged.

    The loader must not write to `guarded` tensors, which are not the model's, and need not fill `optional` ones.
    """
    before, places = tensors_of(model), places_of(model)
    data = {name: tensor.data for name, tensor in before.items()}
    recorder = _Recorder(before.values(), guarded, optional)
    try:
        with torch.no_grad(), recorder:
            load(recorder.sources(schema))
    except EngineError:
        raise
    except Exception as problem:
        where = f" (at tensor {recorder.at!r})" if recorder.at else ""
        reason = f"{type(problem).__name__}: {first_line(problem)}"
        raise EngineError(
            f"the model's loader rejects this checkpoint{where}: {reason}",
            hint="use a checkpoint with the names, shapes and layout that the model was started with",
        ) from problem
    finally:
        replaced = _put_back(model, before, data)
    if replaced or places_of(model) != places:
        raise EngineError(
            f"parameter {replaced!r}: the model's loader replaces it instead of filling it",
            hint="use a model whose layout can be patched in place",
        )
    return recorder.map(model, schema, places)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return {**found, **dict(model.named_buffers(remove_duplicate=False))}


def _put_back(model: torch.nn.Module, before: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor]) -> str:
    """Undoes assignments by the loader. Returns the name of the first parameter it assigned, or an empty string."""
    replaced = ""
    now = tensors_of(model)
    for name, tensor in before.items():
        if now.get(name) is not tensor:
            replaced = replaced or name
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            table = module._parameters if isinstance(tensor, torch.nn.Parameter) else module._buffers
            table[attribute] = tensor
        if storage_of(tensor) != storage_of(data[name]) or tensor.data_ptr() != data[name].data_ptr():
            replaced = replaced or name
            tensor.data = data[name]
    return replaced


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records copies into a model's memory, without making them.

    Tracks which tensors are computed from which source. Rejects other writes to the model's memory, since their result
    cannot be known.
    """

    def __init__(
        self, memory: Iterable[torch.Tensor], guarded: Iterable[torch.Tensor], optional: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        self.at = ""  # the last tensor given to the loader
        self._memory = {storage_of(tensor) for tensor in memory}
        self._guarded = {storage_of(tensor) for tensor in guarded}
        self._names: dict[int, str] = {}  # of sources, by storage
        self._derived: dict[int, set[str]] = {}
        self._kept: list[torch.Tensor] = []  # so that their storages are not reused
        self._copies: dict[str, list[Copy]] = {}
        self._constants = list(optional)  # targets filled with values that are not in a checkpoint
        self._unpatchable: dict[str, Unpatchable] = {}
        self._unpatchable_targets: list[torch.Tensor] = []

    def sources(self, schema: Schema) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in schema.items():
            self.at = name
            # Never written, so it takes no memory.
            source = torch.empty(shape, dtype=torch_dtype(name, dtype), device="cpu")
            self._names[storage_of(source)] = name
            self._kept.append(source)
            yield name, source

    def map(self, model: torch.nn.Module, schema: Schema, places: Places) -> WeightMap:
        for name in self._unpatchable:
            self._unpatchable_targets += [copy.target_view for copy in self._copies.pop(name, ())]
        copies: dict[str, tuple[Copy, ...]] = {}
        taken: set[frozenset[tuple[int, Box]]] = set()
        for name in schema:
            found = tuple(self._copies.get(name, ()))
            place = frozenset((storage_of(copy.target), copy.box) for copy in found)
            if found and place not in taken:  # otherwise it is tied to a tensor that has this place
                copies[name] = found
                taken.add(place)
        unused = frozenset(name for name in schema if name not in copies and name not in self._unpatchable)
        unused -= self._drop_notes(copies, schema)
        self._check_cover(model, [copy for several in copies.values() for copy in several])
        return WeightMap(copies, self._unpatchable, unused, places, tuple(self._unpatchable_targets))

    def _drop_notes(self, copies: dict[str, tuple[Copy, ...]], schema: Schema) -> set[str]:
        """Drops int64 tensors that several loaders write to one place: notes, such as the shape of a packed weight."""
        notes = {name for name in self._copies if schema[name][0].name == "I64"}
        places = Counter((storage_of(copy.target), copy.box) for name in notes for copy in self._copies[name])
        dropped = {
            name for name in notes if any(places[storage_of(one.target), one.box] > 1 for one in self._copies[name])
        }
        for name in dropped:
            self._constants += [copy.target_view for copy in copies.pop(name, ())]
        return dropped

    def _check_cover(self, model: torch.nn.Module, copies: Iterable[Copy]) -> None:
        """Checks that every parameter is filled exactly once. Otherwise the model would serve a mixture."""
        views: dict[int, list[torch.Tensor]] = {}
        for copy in copies:
            views.setdefault(storage_of(copy.target), []).append(copy.target_view)
        others: dict[int, list[torch.Tensor]] = {}
        for view in (*self._constants, *self._unpatchable_targets):
            others.setdefault(storage_of(view), []).append(view)
        for name, parameter in model.named_parameters():
            storage = storage_of(parameter)
            count = parameter.untyped_storage().nbytes() // parameter.element_size()
            times = torch.zeros(count, dtype=torch.uint8)
            for view in views.get(storage, ()):
                times.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
            if bool((times > 1).any()):
                raise EngineError(f"parameter {name!r}: the model's loader writes parts of it twice", hint=_OTHER)
            for view in others.get(storage, ()):
                times.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
            if not bool(times.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset()).all()):
                raise EngineError(f"parameter {name!r}: no tensor of the run fills all of it", hint=_OTHER)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and self._is_ours(args[0]):
            self._note(args[0], args[1])
            return args[0]
        written = [tensor for tensor in _written(func, args, kwargs) if self._is_ours(tensor)]
        if any(storage_of(tensor) in self._guarded for tensor in _written(func, args, kwargs)):
            raise EngineError("the model's loader writes to weights that the engine has rearranged", hint=_OTHER)
        if written:
            return self._note_write(func, args, written)
        if func is _ITEM and (names := self._origins(args)):
            for name in names:
                self._unpatchable[name] = Unpatchable(UnpatchableKind.READ, "the loader reads its values")
        result = func(*args, **kwargs)
        self._trace((*args, *kwargs.values()), result)
        return result

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._memory

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names.get(storage_of(source))
        is_widened = False
        if name is None:
            for origin in (origins := self._origins((source,))):
                self._unpatchable[origin] = Unpatchable(UnpatchableKind.COMPUTED, "the loader computes it")
            (self._unpatchable_targets if origins else self._constants).append(target.detach())
        elif source.dtype != target.dtype and not (is_widened := _is_exact(source.dtype, target.dtype)):
            text = f"the loader casts it to {str(target.dtype).removeprefix('torch.')}"
            self._note_unpatchable(name, Unpatchable(UnpatchableKind.CAST, text), target)
        elif source.shape != target.shape:
            source.expand(target.shape)  # raises if the copy would
            self._note_unpatchable(name, _REPEATED, target)
        else:
            box = Box.of(source, target)
            if not box.is_nested:
                self._note_unpatchable(name, _REPEATED, target)
            else:
                self._copies.setdefault(name, []).append(Copy(box, target.detach(), is_widened))

    def _note_unpatchable(self, name: str, why: Unpatchable, target: torch.Tensor) -> None:
        self._unpatchable[name] = why
        self._unpatchable_targets.append(target.detach())

    def _note_write(self, func: Any, args: tuple[Any, ...], written: list[torch.Tensor]) -> Any:
        """Skips the write. Its target is a constant, or unpatchable if the value came from a checkpoint tensor."""
        if len(written) > 1 or not args or args[0] is not written[0]:
            raise EngineError(f"the model's loader writes to its weights with {func}", hint=_OTHER)
        origins = self._origins(args[1:])
        for name in origins:
            self._unpatchable[name] = Unpatchable(UnpatchableKind.WRITTEN, f"the loader writes it with {func}")
        (self._unpatchable_targets if origins else self._constants).append(written[0].detach())
        return written[0]

    def _origins(self, values: Iterable[Any]) -> set[str]:
        """The checkpoint tensors that these values were copied or computed from."""
        found: set[str] = set()
        for value in _flat(values):
            storage = storage_of(value)
            found |= {self._names[storage]} if storage in self._names else self._derived.get(storage, set())
        return found

    def _trace(self, args: Iterable[Any], result: Any) -> None:
        came = self._origins(args)
        if not came:
            return
        for value in _flat((result,)):
            if storage_of(value) not in self._names:
                self._derived.setdefault(storage_of(value), set()).update(came)
                self._kept.append(value)


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """A bfloat16 is the upper half of a float32, so the cast keeps every bit, also those of NaNs."""
    return (source, target) == (torch.bfloat16, torch.float32)


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


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies a tensor's storage. Valid as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata)
