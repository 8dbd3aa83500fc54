"""The replica's state on disk, changed in place. It recovers to exactly one version after any crash.

    model.safetensors                        memory-mapped
    state.json                               version and digests at the last sync
    journal/<version>-<commit>.safetensors   changes since then, as absolute values

A journal record is on disk before its changes go to the model. So replaying all records repairs lost pages.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec
import numpy as np

from weightwire.delta import BlockJob, Delta, State, digest, write_absolute
from weightwire.errors import ReplicaError
from weightwire.system import durable_files, open_regular, read_regular
from weightwire.weights import MODEL_FILE, HeldWeights, Tensor, nbytes_of, read_header, schema_of_weights

__all__ = ["Position", "Saved", "Workdir", "different", "tensors_of", "to_json", "version_of"]

_STATE, _JOURNAL = "state.json", "journal"
_RECORD = re.compile(r"([0-9]{20})-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class Position:
    """A run and version. `commit` is the SHA-256 of the commit record, in hex."""

    run: str
    version: int
    commit: str

    def __post_init__(self) -> None:
        if not _RECORD.fullmatch(self.record):
            raise ValueError(f"{self} is not a valid position: the commit must be 64 hex digits")

    @property
    def record(self) -> str:
        """The name of the journal record of this version."""
        return f"{self.version:020}-{self.commit}.safetensors"


@dataclass(frozen=True)
class Saved:
    """A version that is being written to disk. Call `flush`, in any thread, then `Workdir.finish`."""

    position: Position
    state: State
    records: tuple[Path, ...]  # the journal records up to this version
    memory: mmap.mmap
    flush: Callable[[], None]
    """Writes the model to disk. Changes of later versions may get there, too: the journal still has them."""


class Workdir:
    """A mapped directory. `weights` are read-only. `lost` is the reason why the memory can no longer be trusted."""

    def __init__(
        self,
        path: Path,
        position: Position,
        state: State,
        memory: mmap.mmap,
        weights: HeldWeights,
        threads: int | None,
    ) -> None:
        """Use `open` or `map`."""
        self.path = path
        self.position = position
        self.state = state
        self.synced = position.version  # the version at the last sync: the journal has all later ones
        self.lost: str | None = None
        self.journal: dict[Path, int] = {}  # records since the last sync, and their sizes
        self.memory = memory
        self._flushing = threading.Lock()
        self._threads = threads
        self._weights = weights
        self.weights = HeldWeights({name: _read_only(tensor) for name, tensor in weights.items()})

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    @cached_property
    def weights_nbytes(self) -> int:
        return nbytes_of(self.weights)

    # --- begin ---------------------------------------------------------------------------------------------------

    @staticmethod
    def complete(path: Path, position: Position, state: State) -> None:
        """Completes a directory with a synced model, so that it can be opened."""
        durable_files.make_directory(path / _JOURNAL)
        durable_files.write_file(path / _STATE, _describe(position, state))

    @classmethod
    def open(cls, path: Path, threads: int | None = None) -> Self:
        """Repairs the directory after a crash and verifies all weights.

        Raises WeightwireError, FileNotFoundError, or ValueError for an empty model, if that is not possible.
        """
        _check_links(path)
        for partial in [*path.glob("*.partial"), *(path / _JOURNAL).glob(".*.partial")]:
            durable_files.remove(partial)
        work = cls.map(path, threads)
        work._replay()
        work.verify()
        return work

    @classmethod
    def map(cls, path: Path, threads: int | None = None) -> Self:
        """Maps a directory that was just completed and needs no repair."""
        with open(open_regular(path / MODEL_FILE, os.O_RDWR), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        weights = tensors_of(memory, str(path / MODEL_FILE))
        position, state = _read_state(path / _STATE, weights)
        return cls(path, position, state, memory, weights, threads)

    def _replay(self) -> None:
        for record in sorted((self.path / _JOURNAL).iterdir()):
            match = _RECORD.fullmatch(record.name)
            if not match:
                continue
            position = Position(self.position.run, int(match[1]), match[2])
            if position.version <= self.position.version:  # synced, but not removed before the crash
                durable_files.remove(record)
                continue
            patch = Delta.open(record)
            after = patch.advance(self.state)
            if after.hex != patch.after:
                patch.corrupt("its state does not match its tensors")
            write_absolute(self._weights, patch, threads=self._threads)
            self.position, self.state, self.journal[record] = position, after, patch.nbytes

    # --- forward -------------------------------------------------------------------------------------------------

    def advance(self, patch: Delta, position: Position, decoded: Sequence[BlockJob] = ()) -> None:
        """Applies a patch of absolute values that was checked before. Must not be interrupted.

        `decoded` are its blocks. The journal has the values before the model does.
        """
        after = patch.advance(self.state)  # a patch for another state is refused before anything is written
        record = self.path / _JOURNAL / position.record
        try:
            patch.write(record)
        except BaseException:
            with suppress(OSError):
                durable_files.remove(record)
            raise
        self.journal[record] = patch.nbytes
        try:
            added = write_absolute(self._weights, patch, threads=self._threads, decoded=decoded)
        except BaseException as problem:
            self._lose(f"writing version {position.version} failed halfway ({problem})", problem)
        names = list(added)
        changes = np.array([added[name] for name in names], np.uint64).reshape(-1, 2)
        wrong = (self.state.digests_of(names) + changes != after.digests_of(names)).any(1)
        for at in np.flatnonzero(wrong)[:1].tolist():
            self._lose(f"tensor {names[at]!r} did not have the expected digest")
        self.position, self.state = position, after

    def sync(self) -> None:
        """Writes all changes to disk and empties the journal."""
        if self.journal:
            saved = self.save()
            saved.flush()
            self.finish(saved)

    def save(self) -> Saved:
        """The version held, to be written to disk. It may advance before `finish`."""
        return Saved(self.position, self.state, tuple(self.journal), self.memory, self._flush)

    def _flush(self) -> None:
        """In any thread. A failure loses the memory at once: the system may have dropped changes, and says so once."""
        with self._flushing:
            try:
                durable_files.flush(self.memory, self.path / MODEL_FILE)
            except OSError as problem:
                self._lose(f"its changes could not be written to disk ({problem.strerror})", problem)

    def check(self) -> None:
        """Raises an error if a flush has failed. Waits for one that is running in another thread."""
        with self._flushing:
            if self.lost:
                self._lose(self.lost)

    def finish(self, saved: Saved) -> None:
        """Removes the journal records up to a version that was written to disk. Does nothing if a later one was."""
        self.check()
        if saved.position.version < self.synced:
            return
        durable_files.write_file(self.path / _STATE, _describe(saved.position, saved.state))
        for record in saved.records:
            durable_files.remove(record)
            del self.journal[record]
        self.synced = saved.position.version

    def verify(self) -> None:
        """Reads and checks all weights."""
        found = digest(self._weights, threads=self._threads)
        if name := different(found, self.state):
            self._lose(f"tensor {name!r} does not have its digest of version {self.position.version}")

    def _lose(self, why: str, cause: BaseException | None = None) -> NoReturn:
        self.lost = why
        raise ReplicaError(f"{self.path}: {why}", hint="open the replica again to repair it, or rebuild it") from cause


def _check_links(path: Path) -> None:
    """Weights are written in place, so a link could lead to a file of somebody else."""
    for parent, folders, names in os.walk(path):
        for one in (Path(parent, name) for name in (*folders, *names)):
            if one.is_symlink():
                raise ReplicaError(f"{one}: a symbolic link", hint="rebuild the replica")


def version_of(record: Path) -> int:
    """The version of a journal record."""
    return int(record.name.partition("-")[0])


def different(found: State, wanted: State) -> str | None:
    """The name of the first tensor that differs, or None."""
    if found == wanted:
        return None
    names = sorted({**found.kinds, **wanted.kinds})
    return next((name for name in names if found.tensors.get(name) != wanted.tensors.get(name)), None)


# --- the files ---------------------------------------------------------------------------------------------------


def tensors_of(memory: mmap.mmap, where: str) -> HeldWeights:
    header = read_header(memoryview(memory), where)
    return HeldWeights(
        {slot.name: Tensor.at(memory, header.size + slot.start, slot.dtype, slot.shape) for slot in header.slots}
    )


def _read_only(tensor: Tensor) -> Tensor:
    bits = tensor.bits.view()
    bits.flags.writeable = False
    return Tensor(tensor.dtype, tensor.shape, bits)


def to_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _describe(position: Position, state: State) -> bytes:
    digests = state.digests.astype("<u8").tobytes().hex()
    return to_json(asdict(position) | {"state": state.hex, "digests": digests})


class _StateFile(msgspec.Struct, frozen=True):
    """state.json: a position, and the digests of all tensors in the order of a state, as little-endian words."""

    run: str
    version: int
    commit: str
    state: str
    digests: str


def _read_state(path: Path, weights: HeldWeights) -> tuple[Position, State]:
    try:
        found = msgspec.json.decode(read_regular(path), type=_StateFile)
        digests = bytes.fromhex(found.digests)
        if len(digests) != 16 * len(weights):
            raise ValueError(f"it does not match {MODEL_FILE}")
        rows = np.frombuffer(digests, "<u8").reshape(-1, 2)
        state = State.of(schema_of_weights(weights), sorted(weights, key=str.encode), rows)
        if state.hex != found.state:
            raise ValueError(f"its state does not match its digests and {MODEL_FILE}")
        return Position(found.run, found.version, found.commit), state
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:  # a UnicodeDecodeError is a ValueError
        raise ReplicaError(f"{path}: cannot be read ({problem!s:.200})", hint="rebuild the replica") from problem
