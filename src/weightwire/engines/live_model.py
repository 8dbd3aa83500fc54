"""A running model's weights: patched in place, verified, and restored if a check fails.

A patch is staged first: checked against the model and turned into writes. `swap` then writes it, and keeps the old
values. The caller must make sure that nobody generates with the model during a swap.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from weightwire.codec import Digest
from weightwire.delta import Delta, Entry, State, TensorState, add_digests, digest, jobs_of
from weightwire.engines.copy_groups import CopyGroups
from weightwire.engines.engine import ServedVersion
from weightwire.engines.recomputed_layer import Recomputation
from weightwire.engines.weight_map import Copy, Load, Unpatchable, WeightMap, learn, places_of, torch_dtype
from weightwire.engines.weight_writes import ScatterPart, Write, changed_outside, join_parts, writes_of
from weightwire.errors import EngineError
from weightwire.system import in_order, to_the_end
from weightwire.weights import Checkpoint, Schema, Tensor, as_torch_integers, schema_of_weights

__all__ = ["LiveModel", "StagedPatch", "WeightLayout", "naked_tensors", "use_all_cores"]


class WeightLayout(Protocol):
    """Knows where the weights of a running model are, without its loader."""

    def learn(self, schema: Schema) -> WeightMap:
        """Where each tensor of a checkpoint is. Changes nothing."""

    def recomputations(self, copies: Iterable[Copy]) -> list[Recomputation]:
        """The layers that must be computed again after these copies were written."""

    def is_current(self) -> bool:
        """Whether all computed layers match the loaded weights."""


class LiveModel:
    """`adopt` or `reload` a checkpoint first. Then `stage` patches to later versions.

    `holding` is the version in the model, or None if that is not known. A `mixed` model may mix weights of two versions
    and must not be used. `load` is the model's own loader. If the engine rearranged the weights after loading,
    `relaid` knows where they are, and `load` must not write them. `is_draft` tells by its name whether a tensor belongs
    to a draft model in the same checkpoint, which this model may leave out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Load,
        *,
        threads: int | None = None,
        relaid: WeightLayout | None = None,
        is_draft: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.holding: ServedVersion | None = None
        self.mixed = False
        self._model = model
        self._load = load
        self._relaid = relaid
        self._is_draft = is_draft
        self._threads = threads
        self._schema: Schema = {}
        self._map = WeightMap({}, {}, frozenset(), ())
        self._groups = CopyGroups({}, {})
        self._state = State({})

    @property
    def unpatchable(self) -> dict[str, Unpatchable]:
        """Tensors that cannot be patched in place, with the reason."""
        return dict(self._map.unpatchable)

    # --- whole checkpoints -------------------------------------------------------------------------------------------

    def learn(self, checkpoint: Checkpoint) -> None:
        """Learns where the tensors of a checkpoint lie in the model. Raises if it belongs to another model."""
        schema = schema_of_weights(checkpoint)
        if schema != self._schema or not self._is_in_place():
            self._schema = {}
            self._map = self._relaid.learn(schema) if self._relaid else learn(self._model, self._load, schema)
            self._groups = CopyGroups(self._map.copies, schema)
            self._schema = schema

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the model holds exactly these bits, apart from `unpatchable` tensors."""
        self.learn(checkpoint)
        for name, copies in self._map.copies.items():
            whole = _as_torch(checkpoint[name])
            for copy in copies:
                source = copy.source_in(whole)
                held = copy.target_view.view(source.dtype)
                if not torch.equal(source.to(held.device), held):
                    return False
        return self._relaid is None or self._relaid.is_current()

    def adopt(self, path: str | Path, target: ServedVersion) -> bool:
        """Returns whether the model already holds exactly this checkpoint, and if so remembers `target`."""
        checkpoint = Checkpoint(path)
        self.learn(checkpoint)
        state = self._state_of(checkpoint, target)
        if self._map.unpatchable or not self.holds(checkpoint):
            return False
        self._state, self.holding, self.mixed = state, target, False
        return True

    def reload(self, path: str | Path, target: ServedVersion) -> None:
        """Loads a checkpoint and compares. If that fails, the model is mixed."""
        checkpoint = Checkpoint(path)
        self.learn(checkpoint)
        state = self._state_of(checkpoint, target)
        self.holding, self.mixed = None, True
        try:
            with torch.no_grad():
                if self._relaid is None:
                    self._load(naked_tensors(checkpoint))
                else:
                    self._load_through_map(checkpoint)
        except EngineError:
            raise
        except Exception as problem:
            raise EngineError(
                f"{path}: the model's loader failed ({type(problem).__name__}: {problem})", hint="reload the checkpoint"
            ) from problem
        if not self.holds(checkpoint):
            raise EngineError(
                f"{path}: the model's weights differ from the checkpoint after loading it",
                hint="use a model whose layout can be patched",
            )
        self._state, self.holding, self.mixed = state, target, False

    def _load_through_map(self, checkpoint: Checkpoint) -> None:
        for name, copies in self._map.copies.items():
            whole = _as_torch(checkpoint[name])
            for copy in copies:
                source = copy.source_in(whole)
                copy.target_view.view(source.dtype).copy_(source)
        for layer in self._recomputations(self._map.copies):
            layer.swap()
        if self._map.unpatchable:
            self._load((name, one) for name, one in naked_tensors(checkpoint) if name in self._map.unpatchable)

    def _recomputations(self, names: Iterable[str]) -> list[Recomputation]:
        """The layers that the engine computes from these tensors."""
        copies = [copy for name in names for copy in self._map.copies.get(name, ())]
        return self._relaid.recomputations(copies) if self._relaid else []

    def _state_of(self, checkpoint: Checkpoint, target: ServedVersion) -> State:
        """The state of a checkpoint, which must be the target version and fit the model."""
        state = digest(checkpoint, threads=self._threads)
        if state.hex != target.state:
            raise EngineError(
                f"{checkpoint.path}: does not hold version {target.version}", hint="rebuild the replica: it is damaged"
            )
        self._check_tied(state)
        return state

    def _check_tied(self, state: State) -> None:
        """A tensor without a place in the model must equal one that has a place: tied weights that were saved twice.

        Integers are no weights by themselves (such as the order of groups), and a draft's weights need no place.
        """
        for name in self._map.unused:
            known = state.tensors[name]
            if (
                known.dtype.is_float
                and not self._is_draft(name)
                and known not in (state.tensors[other] for other in self._map.copies)
            ):
                raise EngineError(
                    f"tensor {name!r}: the model does not use it, and it is not a copy of a tensor that the model uses",
                    hint="serve the same model as the run, with the same tied weights",
                )

    def _is_in_place(self) -> bool:
        return places_of(self._model) == self._map.places

    # --- patches -----------------------------------------------------------------------------------------------------

    def stage(self, patch: Delta, target: ServedVersion) -> StagedPatch:
        """Prepares a patch to this version. Writes nothing to the model."""
        if self.holding is None:
            raise EngineError("the version in the model is unknown", hint="reload the model from a checkpoint")
        if self.holding.run != target.run:
            raise EngineError(
                f"the model holds run {self.holding.run[:12]}, not {target.run[:12]}", hint="reload the model"
            )
        if patch.removed:
            raise EngineError(
                f"tensor {patch.removed[0]!r}: cannot be removed from a running model", hint="reload the model"
            )
        self.check_in_place()
        writes = self._writes_of(patch)
        after = self._state.replace({name: _state_of(entry) for name, entry in patch.entries.items()})
        if after.hex != target.state:
            raise EngineError(
                f"the patch does not lead from version {self.holding.version} to {target.version}",
                hint="reload the model",
            )
        self._check_tied(after)
        last = self._recomputations(patch.entries)
        digests = {write.name: after.tensors[write.name].digest for write in writes}
        unpatchable = [name for name in self._map.unpatchable if name in patch.entries]
        return StagedPatch(self, writes, last, digests, unpatchable, target, self.holding, self._state, after)

    def _writes_of(self, patch: Delta) -> list[Write]:
        writes: list[Write] = []
        parts: list[ScatterPart] = []
        for name, entry in patch.entries.items():
            _check(name, entry, self._schema)
            if name not in self._map.copies or self._groups.covers(entry):
                continue
            for job in jobs_of(patch, [patch.stack_of[name]]):
                for write in writes_of(patch, job, self._map.copies[name]):
                    if isinstance(write, ScatterPart):
                        parts.append(write)
                    else:
                        writes.append(write)
        return [*writes, *join_parts([*parts, *self._groups.parts_of(patch)])]

    def check_in_place(self) -> None:
        """Checks that the weights were not moved or replaced since `learn`."""
        if not self._is_in_place():
            self.holding, self._schema = None, {}
            raise EngineError("the model's parameters were moved or replaced", hint="reload the model")


def _state_of(entry: Entry) -> TensorState:
    """The state of a tensor after a patch of absolute values, which names it."""
    if entry.digest is None:
        raise EngineError(f"tensor {entry.name!r}: the patch has no digest of it", hint="reload the model")
    return entry.state(entry.digest)


@dataclass
class StagedPatch:
    """A prepared patch. `swap` writes all of it or nothing, once. `undo` restores the old values.

    Does not write `unpatchable` tensors: that is up to the caller. Does not keep the Delta: with many tensors, to free
    it takes milliseconds, and that would be in the pause.
    """

    _live: LiveModel
    _writes: list[Write]
    _last_writes: Sequence[Write]  # in order, after the others
    _digests: Mapping[str, Digest]  # of the tensors that are written, afterwards
    unpatchable: list[str]
    target: ServedVersion
    _from: ServedVersion
    _before: State
    _after: State
    _written: list[Write] = field(default_factory=list)
    _is_fresh: bool = True

    def swap(self) -> None:
        """Writes the patch and verifies digests. Restores the old values if that fails."""
        live = self._live
        if not self._is_fresh or live.holding != self._from or live._state is not self._before:
            raise EngineError("the model has changed since this patch was staged", hint="stage the patch again")
        live.check_in_place()
        self._is_fresh = False
        # Until it is done, the version in the model is unknown.
        live.holding, live.mixed = None, True
        try:
            to_the_end(self._write)
        except BaseException:
            self.undo()
            raise
        live._state, live.holding, live.mixed = self._after, self.target, False

    def undo(self) -> None:
        """Restores the values from before the swap. Calling it twice is harmless."""
        if self._is_fresh:
            return

        def put_back(stop: threading.Event) -> None:
            live = self._live
            if live.holding not in (None, self.target):  # something else has been written since
                return
            live.holding, live.mixed = None, True
            while self._written:
                self._written[-1].swap()
                self._written.pop()
            live._state, live.holding, live.mixed = self._before, self._from, False

        to_the_end(put_back)

    def _write(self, stop: threading.Event) -> None:
        todo = iter(self._writes)  # shared: each thread takes the next one

        def work(core: int) -> list[tuple[str, Digest | None]]:
            _use_core(core)
            done = []
            for write in todo:
                done.append((write.name, write.swap()))
                self._written.append(write)  # after the write: a failed one has changed nothing
            return done

        sums: dict[str, Digest] = {}
        cores = _cores(self._live._threads or min(8, os.cpu_count() or 1))
        for done in in_order(work, cores, len(cores)):
            for name, added in done:
                if added is not None:
                    sums[name] = add_digests(sums.get(name, (0, 0)), added)
        for write in self._writes:
            write.check()
        for name, added in sums.items():
            if add_digests(self._before.tensors[name].digest, added) != self._digests[name]:
                raise changed_outside(name)
        for write in self._last_writes:
            write.swap()
            self._written.append(write)


def use_all_cores() -> None:
    """Lets this thread run on any core: an engine may have bound it to a few."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _use_core(core: int) -> None:
    """Binds this short-lived thread to a core. Otherwise all threads would share one core: on the other cores, waiting
    processes of the engine spin."""
    use_all_cores()
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {core})


def _cores(count: int) -> list[int]:
    """Chooses cores, first those that this thread is bound to: other workers may be bound to the rest."""
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = sorted(range(os.cpu_count() or 1), key=lambda core: (core not in bound, core))
    return [cores[index % len(cores)] for index in range(count)]


def naked_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint for a loader, as views of the mapped file."""
    for name in checkpoint:
        tensor = checkpoint[name]
        yield name, _as_torch(tensor).view(torch_dtype(name, tensor.dtype)).reshape(tensor.shape)


def _as_torch(tensor: Tensor) -> torch.Tensor:
    """A flat view as integers, so that NaNs compare by their bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory, which is never written here
        return as_torch_integers(tensor.bits)


def _check(name: str, entry: Entry, schema: Schema) -> None:
    if name not in schema:
        raise EngineError(f"tensor {name!r}: not in the model", hint="serve the same model as the run")
    dtype, shape = schema[name]
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise EngineError(
            f"tensor {name!r}: is {dtype.name} {list(shape)}, but {entry.dtype.name} {list(entry.shape)} in the patch",
            hint="serve the same model as the run",
        )
