"""Finds checkpoints that a trainer has finished writing, and their steps.

A trainer does not announce the end. A checkpoint counts as finished when all shards exist and nothing has changed for
two seconds.
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
from weightwire.system import read_regular
from weightwire.weights import named_step

__all__ = ["CheckpointWatch", "Fingerprint", "FinishedCheckpoint", "fingerprint", "is_shard_set", "step_of"]

Fingerprint = frozenset[tuple[str, int, int, int]]
"""Names, inodes, sizes and times of files. Any write to one of them changes it."""

_QUIET = 2.0  # seconds without a change
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_CHECKPOINT_FILES = (".safetensors", ".json")
_SHARD = re.compile(r".*-[0-9]+-of-0*([0-9]{1,9})\.safetensors")
_INDEX = ".safetensors.index.json"


def fingerprint(paths: Iterable[str | os.PathLike[str]]) -> Fingerprint:
    """Skips files that are gone: that also changes the fingerprint."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append((os.fspath(path), status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)


def is_shard_set(names: Iterable[str]) -> bool:
    """Whether all files are named as shards of one model: model-00001-of-00002.safetensors."""
    return all(_SHARD.fullmatch(name) for name in names)


def step_of(directory: Path) -> int | None:
    """The step in the name (checkpoint-500), or in trainer_state.json, which transformers writes."""
    if (step := named_step(directory.resolve().name)) is not None:
        return step
    return _written_step(directory)


def _written_step(directory: Path) -> int | None:
    try:
        step = json.loads(read_regular(directory / "trainer_state.json"))["global_step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if type(step) is int and step >= 0 else None


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A completely written checkpoint."""

    path: Path
    files: Fingerprint
    step: int | None

    @property
    def modified(self) -> float:
        """The time of the last change, by the clock of the file system."""
        return max(time_ns for _, _, _, time_ns in self.files) / 1e9


class CheckpointWatch:
    """The checkpoints in and below a directory, which may not exist yet. Done ones return only after a change."""

    def __init__(self, parent: Path) -> None:
        if parent.exists() and not parent.is_dir():
            raise CheckpointError(f"{parent}: not a directory", hint="watch the directory that the trainer writes to")
        self._parent = parent
        self._seen: dict[Path, tuple[Fingerprint, float]] = {}  # with the time of the last change
        self._done: dict[Path, Fingerprint] = {}

    def finished(self) -> list[FinishedCheckpoint]:
        """The finished checkpoints that are not marked done, in training order."""
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
        """Marks a checkpoint as published or skipped."""
        self._done[finished.path] = finished.files

    def mark_old_done(self, step: int | None, published: float) -> None:
        """Marks the checkpoints that were published by the time of the newest version.

        Their age is not enough: a later step may have been written but not published. Without steps, the newest
        checkpoint stays open; its digest shows whether it was published.
        """
        there = _in_order(FinishedCheckpoint(path, files, self._step(path)) for path, files in self._scan())
        for one in there:
            late = step is not None and one.step is not None and one.step > step
            unknown = (step is None or one.step is None) and one is there[-1]
            if one.modified <= published and not late and not unknown:
                self.mark_done(one)

    def _scan(self) -> Iterator[tuple[Path, Fingerprint]]:
        own = [
            path for path in _files(self._parent) if path.endswith(_CHECKPOINT_FILES)
        ]  # other files may be logs, which change all the time
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
        """The name of the watched directory says nothing about a step."""
        return step_of(path) if path != self._parent else _written_step(path)


def _in_order(found: Iterable[FinishedCheckpoint]) -> list[FinishedCheckpoint]:
    """Sorted by step if all have one, otherwise by time."""
    listed = list(found)
    if all(one.step is not None for one in listed):
        return sorted(listed, key=lambda one: (one.step or 0, one.modified))
    return sorted(listed, key=lambda one: one.modified)


def _has_all_shards(files: Iterable[str]) -> bool:
    """The index is written last. Without it, the names of the shards have their number."""
    if any(name.endswith(_INDEX) for name in files):
        return True
    counts = [int(shard[1]) for name in files if (shard := _SHARD.fullmatch(name))]
    return not counts or len(counts) >= max(counts)


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:  # it may appear later
        return []


def _files(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    except OSError:
        return []
