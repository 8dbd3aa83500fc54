"""A model whose weights an engine rearranges after loading: packed for kernels, padded, or copied.

Keeps the structure of the model from before, without weights. The model's own loader runs on that structure and shows
where each checkpoint tensor is loaded to; probes have shown where the engine then puts it. Together they map a
checkpoint to the running model. Layers that the engine computes are computed again by its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightwire.engines.box import Box, boxes_of
from weightwire.engines.layout_probes import PostLoad, ProcessedLayout, Relayout, probe
from weightwire.engines.recomputed_layer import Recomputation, RecomputedLayer
from weightwire.engines.skeleton import IsPart, StructureCopier, same_form, tensors_in
from weightwire.engines.weight_map import Copy, Load, WeightMap, learn, places_of, storage_of
from weightwire.errors import EngineError
from weightwire.weights import Schema

__all__ = ["RelaidModel", "skeleton_of"]

LoaderOf = Callable[[torch.nn.Module], Load]


def skeleton_of(model: torch.nn.Module, is_part: IsPart) -> torch.nn.Module:
    """The structure of a model, with parameters that have no memory. Take it after loading, before processing."""

    def without_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            return tensor
        empty = tensor.data.to("meta")
        empty.__class__ = tensor.__class__
        return empty

    copy: torch.nn.Module = StructureCopier(is_part, without_memory).copy(model)
    return copy


@dataclass(frozen=True)
class _RunningPlace:
    """Where a loaded parameter is: `kept` in the running model or beside it, or elsewhere, or both."""

    name: str
    kept: torch.Tensor | None
    relayouts: tuple[tuple[Relayout, torch.Tensor], ...] = ()
    is_moved: bool = False
    is_read: bool = False  # as a plain number
    is_replaced: bool = False  # by a parameter that lacks the loader of the loaded one
    is_optional: bool = False  # a scalar with a default, which the engine reads and removes

    @property
    def storages(self) -> set[int]:
        held = [target for _, target in self.relayouts]
        return {storage_of(one) for one in (held if self.kept is None else [*held, self.kept])}


class RelaidModel:
    """Maps checkpoints to a running model through the layout that probes have found.

    Make it from a skeleton, call `keep_loaded` before the engine processes the model, and `find_places` afterwards.
    `problem` is why the model cannot be patched, or empty.
    """

    def __init__(self, skeleton: torch.nn.Module, process: PostLoad, is_part: IsPart, loader_of: LoaderOf) -> None:
        self.problem = ""
        self._model = self._skeleton = skeleton
        self._process, self._is_part, self._loader_of = process, is_part, loader_of
        self._layouts: dict[str, ProcessedLayout] = {}
        self._loaded: dict[int, torch.Tensor] = {}  # the loaded weights of layers that are computed
        self._places: dict[int, _RunningPlace] = {}
        self._found_in: set[int] = set()  # the storages of the parameters then
        self._recomputed: list[RecomputedLayer] = []
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._probe()

    @property
    def moved(self) -> list[str]:
        """The parameters that are not kept as loaded."""
        return [place.name for place in self._places.values() if place.is_moved]

    @property
    def is_as_loaded(self) -> bool:
        """Whether the engine left all weights as the loader put them, and can load them again."""
        is_changed = any(one.relayouts or one.is_replaced for one in self._places.values())
        return not self.problem and not self._recomputed and not is_changed

    # --- probing -----------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        layouts: dict[tuple[object, ...], ProcessedLayout] = {}
        for path, layer in _layers(self._skeleton, ""):
            form = _form(layer)
            if form not in layouts:
                layouts[form] = probe(layer, self._process, self._is_part)
            self._layouts[path] = layouts[form]
            if layouts[form].problem:
                self.problem = f"{path}.{layouts[form].problem}".removeprefix(".")
                return

    def keep_loaded(self, model: torch.nn.Module) -> None:
        """Copies the loaded weights that the engine does not keep, and that probes cannot find."""
        for path, layout in self._layouts.items():
            loaded = dict(model.get_submodule(path).named_parameters()) if layout.recomputed else {}
            for name, empty in self._skeleton.get_submodule(path).named_parameters():
                if layout.recomputed and f".{name}" in layout.moved:
                    self._loaded[id(empty)] = loaded[name].detach().clone()

    def find_places(self, model: torch.nn.Module) -> None:
        """Finds what the probes have found in the running model. Call it again if modules of it were replaced."""
        self._model = model
        self._found_in = {storage_of(one) for one in model.parameters()}
        self._places, self._recomputed = {}, []
        for path, layout in self._layouts.items():
            problem = self.problem or self._add_layer(path, self._skeleton.get_submodule(path), layout)
            if problem:
                self.problem = self.problem or f"{path}.{problem}".removeprefix(".")
                return
        running = dict(model.named_parameters(remove_duplicate=False))
        for name, loaded in self._skeleton.named_parameters():  # of modules outside of all layers
            if id(loaded) not in self._places:
                self._places[id(loaded)] = _RunningPlace(name, running[name])

    def _add_layer(self, path: str, layer: torch.nn.Module, layout: ProcessedLayout) -> str:
        """Finds the places of a layer in the running model. Returns a problem, or an empty string."""
        running = tensors_in(self._model.get_submodule(path), self._is_part)
        kept_storages = set()
        for name, loaded in layer.named_parameters():
            key = f".{name}"
            is_moved = key in layout.moved
            kept = self._loaded.get(id(loaded)) if is_moved else running.get(key)
            if not is_moved and (kept is None or not same_form(kept, loaded)):
                return f"{name}: has another layout than after a probe"
            found = layout.relayouts.get(key, ())
            if any(one.target not in running or not one.fits(running[one.target]) for one in found):
                return f"{name}: is not where a probe has found it"
            relayouts = tuple((one, running[one.target]) for one in found)
            kept_storages |= set() if kept is None else {storage_of(kept)}
            whole = f"{path}.{name}".removeprefix(".")
            is_optional = key in layout.gone and loaded.numel() == 1
            is_replaced = not is_moved and type(kept) is not type(loaded)
            place = _RunningPlace(whole, kept, relayouts, is_moved, key in layout.read, is_replaced, is_optional)
            self._places.setdefault(id(loaded), place)
        for alias in layout.aliases:
            if alias not in running or storage_of(running[alias]) not in kept_storages:
                return f"{alias[1:]}: is a copy, but a view in a probe"
        return self._add_recomputed(path, layer, layout, running)

    def _add_recomputed(
        self, path: str, layer: torch.nn.Module, layout: ProcessedLayout, running: Mapping[str, torch.Tensor]
    ) -> str:
        for target in layout.recomputed:
            if target not in running:
                return f"{target[1:]}: is not where a probe has found it"
        if layout.recomputed:
            targets = {target: running[target] for target in layout.recomputed}
            made = RecomputedLayer(path, layer, self._kept, targets, self._process, self._is_part)
            self._recomputed.append(made)
        return ""

    def _kept(self, empty: torch.Tensor) -> torch.Tensor | None:
        place = self._places.get(id(empty))
        return None if place is None else place.kept

    # --- computed layers ---------------------------------------------------------------------------------------------

    def recomputations(self, copies: Iterable[Copy]) -> list[Recomputation]:
        """The layers that must be computed again after these copies were written."""
        if not self._recomputed:
            return []
        storages = {storage_of(copy.target) for copy in copies}
        return [
            Recomputation(layer)
            for layer in self._recomputed
            if storages
            & {storage_of(kept) for one in layer.skeleton.parameters() if (kept := self._kept(one)) is not None}
        ]

    def is_current(self) -> bool:
        """Whether all computed layers match the loaded weights."""
        return all(layer.is_current() for layer in self._recomputed)

    # --- maps --------------------------------------------------------------------------------------------------------

    def computes(self, storages: Set[int]) -> bool:
        """Whether a layer of these storages is computed from weights that are kept beside it."""
        return any(storage_of(one) in storages for layer in self._recomputed for one in layer.targets.values())

    def learn(self, schema: Schema, borrowed: Set[int] = frozenset()) -> WeightMap:
        """Where each tensor of a checkpoint is in the running model. Changes nothing.

        `borrowed` storages belong to another model, which fills them: this one need not.
        """
        self._find_again()
        by_storage: dict[int, _RunningPlace] = {}
        optional: list[torch.Tensor] = []

        def as_loaded(tensor: torch.Tensor) -> torch.Tensor:
            place = self._places.get(id(tensor))
            if place is None:
                return tensor
            if place.kept is not None:
                made = place.kept.data
            else:  # never written, so it takes no memory
                made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            by_storage[storage_of(made)] = place
            if place.is_optional or not borrowed.isdisjoint(place.storages):
                optional.append(made.detach())
            made.__class__ = tensor.__class__
            return made

        form: torch.nn.Module = StructureCopier(self._is_part, as_loaded).copy(self._skeleton)
        guarded = [target for place in self._places.values() for _, target in place.relayouts]
        guarded += [target for layer in self._recomputed for target in layer.targets.values()]
        found = learn(form, self._loader_of(form), schema, guarded, optional)
        _check_targets(found, by_storage)
        copies = {
            name: tuple(one for copy in several for one in self._translated(copy, by_storage))
            for name, several in found.copies.items()
        }
        return replace(found, copies=copies, places=places_of(self._model))

    def _find_again(self) -> None:
        """Parameters that were replaced since `find_places` must not be taken for those of the model.

        They may have got other names: an engine wraps layers to add adapters.
        """
        if not self._found_in <= {storage_of(one) for one in self._model.parameters()}:
            self.find_places(self._model)
        if self.problem:
            raise EngineError(f"{self.problem}, since it was replaced", hint="restart the engine")

    def _translated(self, copy: Copy, by_storage: Mapping[int, _RunningPlace]) -> Iterator[Copy]:
        place = by_storage.get(storage_of(copy.target))
        if place is None or place.kept is not None:
            yield copy
        for relayout, target in place.relayouts if place else ():
            for box in _per_slice(copy.box, len(relayout.table)):
                for found in self._relaid_boxes(box, relayout):
                    yield Copy(found, target.detach(), copy.is_widened)

    def _relaid_boxes(self, box: Box, relayout: Relayout) -> Iterator[Box]:
        """The box of a copy, translated. Experts differ only by where they start, so they share one translation."""
        index, first = divmod(box.target_start, len(relayout.table))
        key = (id(relayout.table), box.shape, box.strides, box.target_strides, first)
        if key not in self._boxes:
            sources, loaded = (_positions(box.shape, strides) for strides in (box.strides, box.target_strides))
            targets = relayout.table[loaded + first]
            held = targets >= 0
            self._boxes[key] = tuple(boxes_of(sources[held], targets[held].astype(np.int64)))
        for one in self._boxes[key]:
            start, target_start = box.start + one.start, index * relayout.target_stride + one.target_start
            yield replace(one, start=start, target_start=target_start)


def _check_targets(found: WeightMap, by_storage: Mapping[int, _RunningPlace]) -> None:
    """Checks that the loader fills nothing from which the running model cannot be patched."""
    for target in found.other_targets:
        place = by_storage.get(storage_of(target))
        if place is not None and place.is_moved:
            raise EngineError(
                f"parameter {place.name!r}: computed or cast by the loader, then copied elsewhere",
                hint="publish the run in the dtype that the engine serves",
            )
    for name, copies in found.copies.items():
        for copy in copies:
            place = by_storage.get(storage_of(copy.target))
            if place is not None and place.is_read:
                raise EngineError(
                    f"tensor {name!r}: the engine reads parameter {place.name!r} as a number after loading",
                    hint="restart the engine with this version, or publish the run without this tensor",
                )


def _positions(shape: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[np.int64]:
    positions = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        positions = (positions[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return positions


def _per_slice(box: Box, size: int) -> Iterator[Box]:
    """Cuts a box where its target crosses from one slice to the next."""
    todo = [box]
    while todo:
        box = todo.pop()
        extents = ((count - 1) * stride for count, stride in zip(box.shape, box.target_strides, strict=True))
        if box.target_start // size == (box.target_start + sum(extents)) // size:
            yield box
        elif box.shape[0] == 1:
            todo.append(
                replace(box, shape=box.shape[1:], strides=box.strides[1:], target_strides=box.target_strides[1:])
            )
        else:
            room = (size - box.target_start % size) // box.target_strides[0]
            cut = min(max(1, room), box.shape[0] - 1)
            start, target_start = box.start + cut * box.strides[0], box.target_start + cut * box.target_strides[0]
            todo.append(
                replace(box, shape=(box.shape[0] - cut, *box.shape[1:]), start=start, target_start=target_start)
            )
            todo.append(replace(box, shape=(cut, *box.shape[1:])))


def _layers(module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The parts of a model that are processed apart: the layers of its lists, and modules without such lists."""
    nested = any(isinstance(one, torch.nn.ModuleList) for one in module.modules())
    if not nested or callable(getattr(module, "process_weights_after_loading", None)):
        yield path, module
        return
    for name, child in module.named_children():
        inner = f"{path}.{name}".removeprefix(".")
        if isinstance(module, torch.nn.ModuleList):
            yield inner, child
        else:
            yield from _layers(child, inner)


def _form(layer: torch.nn.Module) -> tuple[object, ...]:
    """Layers of the same form are laid out alike. This is not taken for granted: every load is compared."""

    def of(module: torch.nn.Module) -> Iterator[Any]:
        yield type(module), type(getattr(module, "quant_method", None))
        for name, tensor in module.named_parameters(recurse=False):
            yield name, tensor.dtype, tuple(tensor.shape), tensor.stride()

    return tuple((name, *of(module)) for name, module in layer.named_modules())
