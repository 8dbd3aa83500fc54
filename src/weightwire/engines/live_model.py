"""A running model's weights: patched in place, proven, put back if anything is wrong.

A patch is staged first: checked against the model, and turned into what is to be written where. Nothing is written
until it is swapped in, and then what was there is kept. Knows torch, patches and digests; not who generates with the
model meanwhile: whoever swaps must see to it that nobody does.
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
from weightwire.engines.weight_map import Box, Copy, Load, WeightMap, learn, places_of, torch_dtype
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
    """`adopt` or `reload` a checkpoint first: from then on the model holds a version, and `stage` takes it further.

    `holding` is what the model holds, None where that is not known. `torn` says that some of its weights may be those
    of another version than the others: it must not be used. `load` is the model's own loader.
    """

    def __init__(self, model: torch.nn.Module, load: Load, *, threads: int | None = None) -> None:
        self.holding: ServedVersion | None = None
        self.torn = False
        self._model = model
        self._load = load
        self._threads = threads
        self._schema: Schema = {}
        self._map = WeightMap({}, {}, frozenset(), ())
        self._state = State({})

    @property
    def odd(self) -> dict[str, str]:
        """Tensors that cannot be patched in place, and why."""
        return dict(self._map.odd)

    # --- whole checkpoints -------------------------------------------------------------------------------------------

    def learn(self, checkpoint: Checkpoint) -> None:
        """Where the tensors of a checkpoint lie in the model. Raises where it is a checkpoint of another model."""
        schema = schema_of_weights(checkpoint)
        if schema != self._schema or not self._is_in_place():
            self._schema = {}
            self._map = learn(self._model, self._load, schema)
            self._schema = schema

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether the model holds just these bits, as far as they can be seen."""
        self.learn(checkpoint)
        for name, copies in self._map.copies.items():
            whole = _as_torch(checkpoint[name])
            for copy in copies:
                held = copy.target_view.view(whole.dtype)
                if not torch.equal(copy.source_in(whole).to(held.device), held):
                    return False
        return True

    def adopt(self, path: str | Path, target: ServedVersion) -> bool:
        """Whether the model holds this checkpoint already, bit for bit; if so, it is known from now on."""
        checkpoint = Checkpoint(path)
        self.learn(checkpoint)
        state = self._state_of(checkpoint, target)
        if self._map.odd or not self.holds(checkpoint):
            return False
        self._state, self.holding, self.torn = state, target, False
        return True

    def reload(self, path: str | Path, target: ServedVersion) -> None:
        """Loads a checkpoint, all of it, and compares. Where that fails the model is torn."""
        checkpoint = Checkpoint(path)
        self.learn(checkpoint)
        state = self._state_of(checkpoint, target)
        self.holding, self.torn = None, True
        try:
            with torch.no_grad():
                self._load(naked_tensors(checkpoint))
        except Exception as problem:
            raise EngineError(
                f"{path}: the model's loader failed ({type(problem).__name__}: {problem})", hint="load it again"
            ) from problem
        if not self.holds(checkpoint):
            raise EngineError(
                f"{path}: was loaded, but the model does not hold it", hint="its layout cannot be patched in place"
            )
        self._state, self.holding, self.torn = state, target, False

    def _state_of(self, checkpoint: Checkpoint, target: ServedVersion) -> State:
        """Of a checkpoint that is this version, and one of this model."""
        state = digest(checkpoint, threads=self._threads)
        if state.hex != target.state:
            raise EngineError(
                f"{checkpoint.path}: is not version {target.version}", hint="the replica is damaged: rebuild it"
            )
        self._check_twins(state)
        return state

    def _check_twins(self, state: State) -> None:
        """A tensor that has no place of its own must be the same as one that has: tied weights, saved twice."""
        for name in self._map.placeless:
            known = state.tensors[name]
            if known not in (state.tensors[other] for other in self._map.copies):
                raise EngineError(
                    f"tensor {name!r}: has no place of its own in the model, and is not the same as another tensor",
                    hint="the model ties weights that the run does not, or is another one",
                )

    def _is_in_place(self) -> bool:
        return places_of(self._model) == self._map.places

    # --- patches -----------------------------------------------------------------------------------------------------

    def stage(self, patch: Delta, target: ServedVersion) -> StagedPatch:
        """Gets ready to patch the model to this version; writes nothing to it."""
        if self.holding is None:
            raise EngineError("what the model holds is not known", hint="reload it from a checkpoint")
        if self.holding.run != target.run:
            raise EngineError(f"the model holds run {self.holding.run[:12]}, not {target.run[:12]}", hint="reload it")
        if patch.removed:
            raise EngineError(f"tensor {patch.removed[0]!r}: a running model cannot lose a tensor", hint="reload it")
        self.check_in_place()
        writes: list[_Write] = []
        for name, entry in patch.entries.items():
            _check(name, entry, self._schema)
            for job in jobs_of(patch, {name: entry}) if name in self._map.copies else ():
                writes += _writes(patch, job, self._map.copies[name])
        after = self._state.replace({name: entry.state for name, entry in patch.entries.items()})
        if after.hex != target.state:
            raise EngineError(
                f"the patch does not lead from version {self.holding.version} to {target.version}", hint="reload it"
            )
        self._check_twins(after)
        return StagedPatch(self, writes, patch, target, self.holding, self._state, after)

    def check_in_place(self) -> None:
        """That the weights are where they were: someone may have moved them, or put others in their place."""
        if not self._is_in_place():
            self.holding, self._schema = None, {}
            raise EngineError("the model's parameters are no longer where they were", hint="reload it")


@dataclass
class StagedPatch:
    """A patch that is ready. `swap` writes it, once, all of it or nothing; `undo` puts back what was there.

    Of `odd` tensors nothing is written: that is left to who knows how.
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
    def odd(self) -> list[str]:
        return [name for name in self._patch.entries if name in self._live.odd]

    def swap(self) -> None:
        """Writes, and proves that the model then holds what it should; puts everything back where it does not."""
        live = self._live
        if not self._is_fresh or live.holding != self._from or live._state is not self._before:
            raise EngineError("this patch was made ready for what the model no longer holds", hint="stage it again")
        live.check_in_place()
        self._is_fresh = False
        # Whatever happens in between, nobody is to believe that it holds what it held.
        live.holding, live.torn = None, True
        try:
            to_the_end(self._write)
        except BaseException:
            self.undo()
            raise
        live._state, live.holding, live.torn = self._after, self.target, False

    def undo(self) -> None:
        """Back to what was there before this was swapped in; twice is harmless."""
        if self._is_fresh:
            return

        def put_back(stop: threading.Event) -> None:
            live = self._live
            if live.holding not in (None, self.target):  # something else has been written since
                return
            live.holding, live.torn = None, True
            while self._written:
                self._written[-1].swap()
                self._written.pop()
            live._state, live.holding, live.torn = self._before, self._from, False

        to_the_end(put_back)

    def _write(self, stop: threading.Event) -> None:
        todo = iter(self._writes)  # of which every thread takes the next

        def work(core: int) -> list[tuple[str, Digest | None]]:
            _use_core(core)
            done = []
            for write in todo:
                done.append((write.name, write.swap()))
                self._written.append(write)  # only now: one that failed has written nothing
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
                raise EngineError(
                    f"tensor {name!r}: would have another digest than it should",
                    hint="reload the model: it has drifted",
                )


def use_all_cores() -> None:
    """For this thread: an engine may have bound it to some, which stand idle while the others do the work."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _use_core(core: int) -> None:
    """For this thread, which ends soon. Left to themselves all would share one core: on others processes spin, and wait
    for this engine."""
    use_all_cores()
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {core})


def _cores(count: int) -> list[int]:
    """As many, beginning with those that this thread is bound to: other workers may be bound to the others."""
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = sorted(range(os.cpu_count() or 1), key=lambda core: (core not in bound, core))
    return [cores[index % len(cores)] for index in range(count)]


def naked_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint as a loader takes it: views of the mapped file."""
    for name in checkpoint:
        tensor = checkpoint[name]
        yield name, _as_torch(tensor).view(torch_dtype(name, tensor.dtype)).reshape(tensor.shape)


def _as_torch(tensor: Tensor) -> torch.Tensor:
    """Flat, as integers: NaNs are compared like everything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that may not be written: nobody does
        return as_torch_integers(tensor.bits)


def _check(name: str, entry: Entry, schema: Schema) -> None:
    if name not in schema:
        raise EngineError(f"tensor {name!r}: the model has none", hint="it serves another model than the run's")
    dtype, shape = schema[name]
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise EngineError(
            f"tensor {name!r}: is {dtype.name} {list(shape)}, and {entry.dtype.name} {list(entry.shape)} in the patch",
            hint="it serves another model than the run's",
        )


# --- writes ------------------------------------------------------------------------------------------------------


class _Write(Protocol):
    """Some units of the model's memory, and what they are to become. To swap twice is to undo it."""

    name: str

    def swap(self) -> Digest | None:
        """What it adds to the tensor's digest, if that can be told."""

    def check(self) -> None:
        """That what was written is there, where no digest tells."""


def _writes(patch: Delta, job: BlockJob, copies: tuple[Copy, ...]) -> Iterator[_Write]:
    entry, layout = job.entry, job.entry.layout
    found = job.patch
    if found is None:
        with naming(patch, entry, job.index):
            found = codec.decode(patch.block(entry, job.index), None, layout, job.index)
    begin, end = layout.span(job.index)
    whole = len(copies) == 1 and copies[0].box.is_run and copies[0].box.count == layout.count
    for copy in copies:
        if copy.target.device.type != "cpu":
            yield from _device_write(entry, copy, found, begin, end)
        elif whole:
            first = copy.box.target_start + begin
            memory = _memory(copy.target)[first : first + end - begin]
            yield _HostWrite(entry.name, memory, found.positions, bytearray(found.values), layout, begin)
        else:
            yield from _part_write(entry, copy, found, begin, end)


def _positions_of(found: codec.Patch, begin: int, end: int) -> npt.NDArray[np.int64]:
    if found.positions is None:
        return np.arange(begin, end)
    return np.frombuffer(found.positions, _ALL).astype(np.int64) + begin


def _select(entry: Entry, box: Box, found: codec.Patch, begin: int, end: int) -> tuple[npt.NDArray[np.int64], Bits]:
    """Where in the target's storage which values go."""
    selection = box.select(_positions_of(found, begin, end))
    values = np.frombuffer(bytes(found.values), f"<u{entry.dtype.unit}")[selection.chosen]
    return selection.positions.astype(np.int64) + box.target_start, values


def _part_write(entry: Entry, copy: Copy, found: codec.Patch, begin: int, end: int) -> Iterator[_Write]:
    at, values = _select(entry, copy.box, found, begin, end)
    if not len(at):
        return
    first, last = int(at.min()), int(at.max()) + 1
    memory = _memory(copy.target)[first:last]
    if last - first > 1 << 32:
        raise EngineError(f"tensor {entry.name!r}: is too large to be patched in place", hint="reload the model")
    yield _HostWrite(
        entry.name, memory, (at - first).astype(_ALL).tobytes(), bytearray(values.tobytes()), None, expected=values
    )


def _device_write(entry: Entry, copy: Copy, found: codec.Patch, begin: int, end: int) -> Iterator[_Write]:
    at, values = _select(entry, copy.box, found, begin, end)
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
    layout: Layout | None  # of the tensor, where `memory` is one block of it: only then a digest can be told
    begin: int = 0
    expected: Bits | None = None

    def swap(self) -> Digest | None:
        patch = Patch(self.positions, self.values)
        if self.layout is None:
            codec.swap_units(self.memory, patch, self.memory.dtype.itemsize, 0)
            return None
        return codec.swap_units(self.memory, patch, self.layout.word, self.layout.word_index(self.begin))

    def check(self) -> None:
        if self.expected is None or self.positions is None:
            return
        if not np.array_equal(self.memory[np.frombuffer(self.positions, _ALL)], self.expected):
            raise EngineError(f"tensor {self.name!r}: does not hold what was written to it", hint="reload the model")


@dataclass
class _DeviceWrite:
    name: str
    memory: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor
    expected: torch.Tensor | None = None

    def swap(self) -> None:
        held = self.memory[self.positions]
        self.memory[self.positions] = self.values  # the last that can fail, and it needs no memory
        self.values, self.expected = held, self.values

    def check(self) -> None:
        if not torch.equal(self.memory[self.positions], self.expected):
            raise EngineError(f"tensor {self.name!r}: does not hold what was written to it", hint="reload the model")


def _flat(target: torch.Tensor) -> torch.Tensor:
    """All units of the storage that a tensor lies in, as integers."""
    flat = torch.empty(0, dtype=torch_integer_dtype(target.element_size()), device=target.device)
    return flat.set_(target.untyped_storage())


def _memory(target: torch.Tensor) -> Bits:
    units: Any = _flat(target).numpy()
    memory: Bits = units.view(f"<u{target.element_size()}")
    return memory
