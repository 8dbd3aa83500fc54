"""Which checkpoints a trainer has finished writing, and which steps they are of.

Knows directories, names and times; reads no weights and no bucket. A trainer does not say when it has finished, so one
that opens, and in which nothing has changed for two seconds, counts as finished.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weightwire.errors import CheckpointError
from weightwire.weights import named_step

__all__ = ["CheckpointWatch", "Fingerprint", "FinishedCheckpoint", "fingerprint", "step_of"]

Fingerprint = frozenset[tuple[str, int, int, int]]
"""Of files: their names, inodes, sizes and times. Whoever writes to one of them changes it."""

_QUIET = 2.0  # seconds
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_OURS = (".safetensors", ".json")
_SHARD = re.compile(r".*-[0-9]+-of-0*([0-9]{1,9})\.safetensors")
_INDEX = ".safetensors.index.json"


def fingerprint(paths: Iterable[str | os.PathLike[str]]) -> Fingerprint:
    """What has gone meanwhile is left out, which is a change too."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append((os.fspath(path), status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)


def step_of(directory: Path) -> int | None:
    """checkpoint-500 is of step 500; others may say so in a file, as the trainer of transformers does."""
    if (step := named_step(directory.resolve().name)) is not None:
        return step
    return _written_step(directory)


def _written_step(directory: Path) -> int | None:
    try:
        step = json.loads((directory / "trainer_state.json").read_bytes())["global_step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int and step >= 0 else None


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A directory with weights that nobody is writing to any more."""

    path: Path
    files: Fingerprint
    step: int | None

    @property
    def modified(self) -> float:
        """Seconds since 1970, by the clock of the file system."""
        return max(time_ns for _, _, _, time_ns in self.files) / 1e9


class CheckpointWatch:
    """The checkpoints below a directory, and in it. What has been marked done comes again only after it has changed."""

    def __init__(self, parent: Path) -> None:
        if not parent.is_dir():
            raise CheckpointError(f"{parent}: no such directory", hint="watch the one that the trainer writes into")
        self._parent = parent
        self._seen: dict[Path, tuple[Fingerprint, float]] = {}  # and since when
        self._done: dict[Path, Fingerprint] = {}

    def finished(self) -> list[FinishedCheckpoint]:
        """Those that are finished and not marked done, in the order in which they were trained."""
        now, before = time.monotonic(), self._seen
        self._seen = {}
        for path, files in self._scan():
            known = before.get(path)
            self._seen[path] = known if known is not None and known[0] == files else (files, now)
        quiet = [(path, files) for path, (files, since) in self._seen.items() if now - since >= _QUIET]
        return _in_order(
            FinishedCheckpoint(path, files, self._step(path)) for path, files in quiet if self._is_open(path, files)
        )

    def mark_done(self, finished: FinishedCheckpoint) -> None:
        """It is published, or there is nothing to be done about it."""
        self._done[finished.path] = finished.files

    def mark_old_done(self, step: int | None, published: float) -> None:
        """Settles what must have been published when the version of a step was.

        That it was there by then is not enough: it may have waited its turn. What cannot be told by its step may be the
        next one if it is the newest; if it is not, its digest will show.
        """
        there = _in_order(FinishedCheckpoint(path, files, self._step(path)) for path, files in self._scan())
        for one in there:
            late = step is not None and one.step is not None and one.step > step
            unknown = (step is None or one.step is None) and one is there[-1]
            if one.modified <= published and not late and not unknown:
                self.mark_done(one)

    def _scan(self) -> Iterator[tuple[Path, Fingerprint]]:
        own = [path for path in _files(self._parent) if path.endswith(_OURS)]  # others may be logs, which never rest
        for path, files in [(self._parent, own), *((folder, _files(folder)) for folder in _folders(self._parent))]:
            if (
                any(name.endswith(_WEIGHTS) for name in files)
                and _has_all_shards(files)
                and (now := fingerprint(files))
            ):
                yield path, now

    def _is_open(self, path: Path, files: Fingerprint) -> bool:
        return self._done.get(path) != files

    def _step(self, path: Path) -> int | None:
        """The name of the directory that is watched is that of the whole training."""
        return step_of(path) if path != self._parent else _written_step(path)


def _in_order(found: Iterable[FinishedCheckpoint]) -> list[FinishedCheckpoint]:
    """By step, where all have one."""
    listed = list(found)
    if all(one.step is not None for one in listed):
        return sorted(listed, key=lambda one: (one.step or 0, one.modified))
    return sorted(listed, key=lambda one: one.modified)


def _has_all_shards(files: Iterable[str]) -> bool:
    """Shards come before the index: without one, their names tell how many there will be."""
    if any(name.endswith(_INDEX) for name in files):
        return True
    counts = [int(shard[1]) for name in files if (shard := _SHARD.fullmatch(name))]
    return not counts or len(counts) >= max(counts)


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:  # gone for now: it may come back
        return []


def _files(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    except OSError:
        return []
