"""A state on disk that is changed in place, and is of exactly one version after any crash.

    model.safetensors                        memory-mapped
    state.json                               what it held when it was last synced
    journal/<version>-<commit>.safetensors   what has been written to it since, in absolute values

A record is on disk before anything of it is written to the model. So whichever pages of the model were lost, it is
repaired by writing all records again. Knows files, weights and deltas; not what else is held, nor for whom.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from weightwire.delta import Delta, State, TensorState, add_digests, digest, write_absolute
from weightwire.errors import ReplicaError
from weightwire.system import durable_files
from weightwire.weights import MODEL_FILE, Tensor, Weights, read_header

__all__ = ["Position", "Workdir", "different", "to_json"]

_STATE, _JOURNAL = "state.json", "journal"
_RECORD = re.compile(r"(\d{20})-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class Position:
    """Which version of which run this is. `commit` is the SHA-256 of the version's commit record, in hex."""

    run: str
    version: int
    commit: str

    def __post_init__(self) -> None:
        if not _RECORD.fullmatch(self.record):
            raise ValueError(f"{self} is no position: the commit must be 64 hex digits")

    @property
    def record(self) -> str:
        """The name of the journal record that leads here."""
        return f"{self.version:020}-{self.commit}.safetensors"


class Workdir:
    """A mapped directory. `weights` may be read; `lost` says why what is in memory cannot be relied on any more."""

    def __init__(self, path: Path, position: Position, state: State, memory: mmap.mmap, threads: int | None) -> None:
        """Not to be called: see `open`."""
        self.path = path
        self.position = position
        self.state = state
        self.lost: str | None = None
        self.journal: dict[Path, int] = {}  # records since the last sync, and their sizes
        self._memory = memory
        self._threads = threads
        self._weights = _tensors(memory, str(path / MODEL_FILE))
        self.weights: Weights = {name: _read_only(tensor) for name, tensor in self._weights.items()}

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    # --- begin ---------------------------------------------------------------------------------------------------

    @staticmethod
    def complete(path: Path, position: Position, state: State) -> None:
        """Makes a directory that holds a model, which is on disk, one that can be opened."""
        durable_files.make_directory(path / _JOURNAL)
        durable_files.write_file(path / _STATE, _describe(position, state))

    @classmethod
    def open(cls, path: Path, threads: int | None = None) -> Self:
        """Repairs what a crash left, and reads all weights to be sure of it.

        Raises WeightwireError, ValueError, LookupError, TypeError or FileNotFoundError where that is not possible.
        """
        for partial in [*path.glob("*.partial"), *(path / _JOURNAL).glob(".*.partial")]:
            durable_files.remove(partial)
        work = cls.map(path, threads)
        work._replay()
        work.verify()
        return work

    @classmethod
    def map(cls, path: Path, threads: int | None = None) -> Self:
        """One that was completed just now, and needs no repair."""
        with (path / MODEL_FILE).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        position, state = _read_state((path / _STATE).read_bytes(), _tensors(memory, str(path / MODEL_FILE)))
        return cls(path, position, state, memory, threads)

    def _replay(self) -> None:
        for record in sorted((self.path / _JOURNAL).iterdir()):
            match = _RECORD.fullmatch(record.name)
            if not match:
                continue
            position = Position(self.position.run, int(match[1]), match[2])
            if position.version <= self.position.version:  # it was synced, and then there was no time to remove it
                durable_files.remove(record)
                continue
            patch = Delta.open(record)
            after = patch.advance(self.state)
            if after.hex != patch.after:
                patch.corrupt("its state is not that of its tensors")
            write_absolute(self._weights, patch, threads=self._threads)
            self.position, self.state, self.journal[record] = position, after, patch.nbytes

    # --- forward -------------------------------------------------------------------------------------------------

    def advance(self, patch: Delta, position: Position) -> None:
        """Goes on to a later version by a patch of absolute values, which is known to fit. Not to be interrupted."""
        record = self.path / _JOURNAL / position.record
        try:
            patch.write(record)
        except BaseException:
            with suppress(OSError):
                durable_files.remove(record)
            raise
        self.journal[record] = patch.nbytes
        try:
            added = write_absolute(self._weights, patch, threads=self._threads)
        except BaseException as problem:
            self._lose(f"writing version {position.version} ended half-way ({problem})", problem)
        for name, entry in patch.entries.items():
            if add_digests(self.state.tensors[name].digest, added[name]) != entry.digest:
                self._lose(f"tensor {name!r} did not hold what it should")
        self.position, self.state = position, patch.advance(self.state)

    def sync(self) -> None:
        """Brings all changes to disk, and so does away with the journal."""
        if not self.journal:
            return
        try:
            durable_files.flush(self._memory, self.path / MODEL_FILE)
        except OSError as problem:
            # The system may have dropped what it could not write, and will not say so again.
            self._lose(f"its changes could not be brought to disk ({problem.strerror})", problem)
        durable_files.write_file(self.path / _STATE, _describe(self.position, self.state))
        for record in self.journal:
            durable_files.remove(record)
        self.journal = {}

    def verify(self) -> None:
        """Reads all weights once more."""
        found = digest(self._weights, threads=self._threads)
        if name := different(found, self.state):
            self._lose(f"tensor {name!r} is not what it was in version {self.position.version}")

    def _lose(self, why: str, cause: BaseException | None = None) -> NoReturn:
        self.lost = why
        raise ReplicaError(
            f"{self.path}: {why}", hint="open the replica again, which repairs it if it can be, or rebuild it"
        ) from cause


def different(found: State, wanted: State) -> str | None:
    """The first tensor in which two states differ."""
    names = sorted({**found.tensors, **wanted.tensors})
    return next((name for name in names if found.tensors.get(name) != wanted.tensors.get(name)), None)


# --- the files ---------------------------------------------------------------------------------------------------


def _tensors(memory: mmap.mmap, where: str) -> dict[str, Tensor]:
    header = read_header(memoryview(memory), where)
    return {slot.name: Tensor.at(memory, header.size + slot.start, slot.dtype, slot.shape) for slot in header.slots}


def _read_only(tensor: Tensor) -> Tensor:
    bits = tensor.bits.view()
    bits.flags.writeable = False
    return Tensor(tensor.dtype, tensor.shape, bits)


def to_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _describe(position: Position, state: State) -> bytes:
    digests = {name: [f"{one:016x}" for one in tensor.digest] for name, tensor in state.tensors.items()}
    return to_json(asdict(position) | {"state": state.hex, "tensors": digests})


def _read_state(data: bytes, weights: Weights) -> tuple[Position, State]:
    value = json.loads(data)
    state = State(
        {
            name: TensorState(weights[name].dtype, weights[name].shape, (int(a, 16), int(b, 16)))
            for name, (a, b) in value["tensors"].items()
        }
    )
    if state.hex != value["state"] or len(state.tensors) != len(weights):
        raise ValueError(f"{_STATE} is not that of {MODEL_FILE}")
    return Position(value["run"], value["version"], value["commit"]), state
