"""A running model's weights: patched in place, verified, and restored if a check fails.

A patch is staged first: checked against the model and turned into writes. `swap` then writes it, and keeps the old
values. The caller must make sure that nobody generates with the model during a swap.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weightwire import codec
from weightwire.codec import Digest, Layout, Patch
from weightwire.delta import BlockJob, Delta, Entry, State, add_digests, digest, jobs_of, naming
from weightwire.engines.engine import ServedVersion
from weightwire.engines.weight_map import Copy, Load, Unpatchable, WeightMap, learn, places_of, torch_dtype
from weightwire.errors import EngineError
from weightwire.system import in_order, to_the_end
from weightwire.weights import (
    Bits,
    Checkpoint,
    Schema,
    Tensor,
    as_torch_integers,
    schema_of_weights,
    torch_integer_dtype,
)

__all__ = ["LiveModel", "StagedPatch", "naked_tensors", "use_all_cores"]

_ALL = np.dtype("<u4")


class LiveModel:
    """`adopt` or `reload` a checkpoint first. Then `stage` patches to later versions.

    `holding` is the version in the model, or None if that is not known. A `mixed` model may mix weights of two versions
    and must not be used. `load` is the model's own loader.
    """

    def __init__(self, model: torch.nn.Module, load: Load, *, threads: int | None = None) -> None:
        self.holding: ServedVersion | None = None
        self.mixed = False
        self._model = model
        self._load = load
        self._threads = threads
        self._schema: Schema = {}
        self._map = WeightMap({}, {}, frozenset(), ())
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
            self._map = learn(self._model, self._load, schema)
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
        return True

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
                self._load(naked_tensors(checkpoint))
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
        """A tensor without a place in the model must equal one that has a place: tied weights that were saved twice."""
        for name in self._map.unused:
            known = state.tensors[name]
            if known not in (state.tensors[other] for other in self._map.copies):
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
        writes: list[_Write] = []
        for name, entry in patch.entries.items():
            _check(name, entry, self._schema)
            for job in jobs_of(patch, {name: entry}) if name in self._map.copies else ():
                writes += _writes(patch, job, self._map.copies[name])
        after = self._state.replace({name: entry.state for name, entry in patch.entries.items()})
        if after.hex != target.state:
            raise EngineError(
                f"the patch does not lead from version {self.holding.version} to {target.version}",
                hint="reload the model",
            )
        self._check_tied(after)
        return StagedPatch(self, writes, patch, target, self.holding, self._state, after)

    def check_in_place(self) -> None:
        """Checks that the weights were not moved or replaced since `learn`."""
        if not self._is_in_place():
            self.holding, self._schema = None, {}
            raise EngineError("the model's parameters were moved or replaced", hint="reload the model")


@dataclass
class StagedPatch:
    """A prepared patch. `swap` writes all of it or nothing, once. `undo` restores the old values.

    Does not write `unpatchable` tensors: that is up to the caller.
    """

    _live: LiveModel
    _writes: list[_Write]
    _patch: Delta
    target: ServedVersion
    _from: ServedVersion
    _before: State
    _after: State
    _written: list[_Write] = field(default_factory=list)
    _is_fresh: bool = True

    @property
    def unpatchable(self) -> list[str]:
        return [name for name in self._patch.entries if name in self._live.unpatchable]

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
            if add_digests(self._before.tensors[name].digest, added) != self._patch.entries[name].digest:
                raise _changed_outside(name)


def _changed_outside(name: str) -> EngineError:
    return EngineError(
        f"tensor {name!r}: does not have the expected digest after the patch",
        hint="reload the model: its weights were changed from outside",
    )


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


# --- writes ------------------------------------------------------------------------------------------------------


class _Write(Protocol):
    """Units of the model's memory and their new values. A second `swap` undoes the first."""

    @property
    def name(self) -> str: ...

    def swap(self) -> Digest | None:
        """Returns what it adds to the tensor's digest, if that is known."""

    def check(self) -> None:
        """Reads the written values back, where no digest covers them."""


def _writes(patch: Delta, job: BlockJob, copies: tuple[Copy, ...]) -> Iterator[_Write]:
    entry, layout = job.entry, job.entry.layout
    found = job.patch
    if found is None:
        with naming(patch, entry, job.index):
            found = codec.decode(patch.block(entry, job.index), None, layout, job.index)
    begin, end = layout.span(job.index)
    only = copies[0]
    whole = len(copies) == 1 and only.box.is_run and only.box.count == layout.count
    for copy in copies:
        if copy.target.device.type != "cpu":
            yield from _device_write(entry, copy, found, begin, end)
        elif whole:
            first = copy.box.target_start + begin
            memory = _memory(copy.target)[first : first + end - begin]
            if copy.is_widened:
                yield _WidenedWrite(_widened(entry.name, memory, found), layout, begin)
            else:
                yield _HostWrite(entry.name, memory, found.positions, bytearray(found.values), layout, begin)
        else:
            yield from _part_write(entry, copy, found, begin, end)


def _positions_of(found: codec.Patch, begin: int, end: int) -> npt.NDArray[np.int64]:
    if found.positions is None:
        return np.arange(begin, end)
    return np.frombuffer(found.positions, _ALL).astype(np.int64) + begin


def _select(entry: Entry, copy: Copy, found: codec.Patch, begin: int, end: int) -> tuple[npt.NDArray[np.int64], Bits]:
    """Positions in the target's storage, and the values to write there."""
    selection = copy.box.select(_positions_of(found, begin, end))
    values: Bits = np.frombuffer(bytes(found.values), f"<u{entry.dtype.unit}")[selection.chosen]
    if copy.is_widened:
        values = _widen(values)
    return selection.positions.astype(np.int64) + copy.box.target_start, values


def _widen(values: Bits) -> Bits:
    """bfloat16 as float32."""
    wide: Bits = np.left_shift(values.astype("<u4"), np.uint32(16))
    return wide


def _widened(name: str, memory: Bits, found: codec.Patch) -> _HostWrite:
    values = _widen(np.frombuffer(bytes(found.values), "<u2"))
    return _HostWrite(name, memory, found.positions, bytearray(values.tobytes()), None, expected=values)


def _part_write(entry: Entry, copy: Copy, found: codec.Patch, begin: int, end: int) -> Iterator[_Write]:
    at, values = _select(entry, copy, found, begin, end)
    if not len(at):
        return
    first, last = int(at.min()), int(at.max()) + 1
    memory = _memory(copy.target)[first:last]
    if last - first > 1 << 32:
        raise EngineError(f"tensor {entry.name!r}: too large to patch in place", hint="reload the model")
    yield _HostWrite(
        entry.name, memory, (at - first).astype(_ALL).tobytes(), bytearray(values.tobytes()), None, expected=values
    )


def _device_write(entry: Entry, copy: Copy, found: codec.Patch, begin: int, end: int) -> Iterator[_Write]:
    at, values = _select(entry, copy, found, begin, end)
    if len(at):
        device = copy.target.device
        units = as_torch_integers(np.array(values))
        yield _DeviceWrite(entry.name, _flat(copy.target), torch.from_numpy(at).to(device), units.to(device))


@dataclass
class _HostWrite:
    name: str
    memory: Bits
    positions: bytes | None
    values: bytearray
    layout: Layout | None  # if `memory` is one whole block of the tensor: only then a digest is known
    begin: int = 0
    expected: Bits | None = None

    def swap(self) -> Digest | None:
        patch = Patch(self.positions, self.values)
        if self.layout is None:
            codec.swap_units(self.memory, patch, self.memory.dtype.itemsize, 0)
            return None
        return codec.swap_units(self.memory, patch, self.layout.word, self.layout.word_index(self.begin))

    def check(self) -> None:
        if self.expected is None:
            return
        held = self.memory if self.positions is None else self.memory[np.frombuffer(self.positions, _ALL)]
        if not np.array_equal(held, self.expected):
            raise EngineError(
                f"tensor {self.name!r}: read-back differs from the written values", hint="reload the model"
            )


@dataclass
class _WidenedWrite:
    """Writes bfloat16 values to a whole block that the model holds in float32. The digest is over the high halves."""

    write: _HostWrite
    layout: Layout
    begin: int
    is_foreign: bool = False  # low halves were not zero: no version has such values

    @property
    def name(self) -> str:
        return self.write.name

    def swap(self) -> Digest:
        added = self._digest_change()
        self.write.swap()
        return added

    def _digest_change(self) -> Digest:
        """Reads only the words that are written: the rest of `narrow` stays undefined."""
        write, word = self.write, self.layout.word
        narrow: Bits = np.empty(len(write.memory), "<u2")
        if write.positions is None:
            narrow[:] = write.memory >> np.uint32(16)
            self.is_foreign |= bool((write.memory & np.uint32(0xFFFF)).any())
        else:
            per_word = word // 2
            words = np.frombuffer(write.positions, _ALL).astype(np.int64) // per_word
            touched = words[:, None] * per_word + np.arange(per_word)
            held = write.memory[touched]
            narrow[touched] = held >> np.uint32(16)
            self.is_foreign |= bool((held & np.uint32(0xFFFF)).any())
        values = (np.frombuffer(write.values, "<u4") >> np.uint32(16)).astype("<u2")
        patch = Patch(write.positions, bytearray(values.tobytes()))
        return codec.swap_units(narrow, patch, word, self.layout.word_index(self.begin))

    def check(self) -> None:
        self.write.check()
        if self.is_foreign:
            raise _changed_outside(self.name)


@dataclass
class _DeviceWrite:
    name: str
    memory: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    expected: torch.Tensor | None = None

    def swap(self) -> None:
        held = self.memory[self.positions]
        self.memory[self.positions] = self.values  # the last step that can fail; allocates nothing
        self.values, self.expected = held, self.values

    def check(self) -> None:
        if not torch.equal(self.memory[self.positions], self.expected):
            raise EngineError(
                f"tensor {self.name!r}: read-back differs from the written values", hint="reload the model"
            )


def _flat(target: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as integers."""
    flat = torch.empty(0, dtype=torch_integer_dtype(target.element_size()), device=target.device)
    return flat.set_(target.untyped_storage())


def _memory(target: torch.Tensor) -> Bits:
    units: Any = _flat(target).numpy()
    memory: Bits = units.view(f"<u{target.element_size()}")
    return memory
