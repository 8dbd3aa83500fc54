"""Facts about this machine and its engines: directories, disk, shared memory, and what an engine's server answers."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weightwire.engines.registry import find_engine, split_engine
from weightwire.errors import WeightwireError
from weightwire.system import durable_files

__all__ = [
    "Disk",
    "EngineAnswer",
    "MissingDirectory",
    "ask_engine",
    "find_missing_directory",
    "free_shared_memory",
    "look_at_disk",
]

_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = ".weightwire-doctor-"


@dataclass(frozen=True)
class Disk:
    """The file system of a replica directory."""

    directory: Path
    free: int = 0  # bytes, including the files in the directory, which a replica reuses
    shares_blocks: bool = False  # a copy of a file takes no space
    problem: str = ""  # why nothing can be written there


@dataclass(frozen=True)
class MissingDirectory:
    """The directory of a run that does not exist yet, or a path that is not a directory."""

    path: Path
    parent: Path  # the nearest path that exists
    can_be_created: bool


@dataclass(frozen=True)
class EngineAnswer:
    """What the server of an engine answered."""

    kind: str
    software: str = ""  # such as "vLLM 0.29.0"; empty if its kind of engine cannot be asked
    version: int | None = None  # of the weights that it serves
    problem: WeightwireError | None = None


def look_at_disk(directory: Path) -> Disk:
    """Writes two small temporary files. Does not create the directory."""
    directory = directory.expanduser().absolute()
    existing = _nearest_existing(directory)
    try:
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=existing) as folder:
            file = Path(folder, "file")
            file.write_bytes(bytes(4096))
            shares_blocks = durable_files.clone_file(file, Path(folder, "copy"))
        return Disk(directory, shutil.disk_usage(existing).free + _held(directory), shares_blocks)
    except OSError as problem:
        return Disk(directory, problem=problem.strerror or str(problem))


def find_missing_directory(url: str) -> MissingDirectory | None:
    """None if the URL is not a directory, or if the directory exists."""
    path = Path(url)
    if "://" in url or path.is_dir():
        return None
    parent = _nearest_existing(path)
    try:
        # Permissions do not tell: nobody can create a directory in /proc.
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=parent):
            return MissingDirectory(path, parent, True)
    except OSError:
        return MissingDirectory(path, parent, False)


def _nearest_existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.exists())


def _held(directory: Path) -> int:
    files = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sum(file.lstat().st_blocks * 512 for file in files)


def free_shared_memory() -> int | None:
    """None if this machine has none: engines then get patches through the temporary directory."""
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None


def ask_engine(text: str) -> EngineAnswer:
    """Asks without side effects: a follower may be updating the engine at the same time."""
    kind, url = split_engine(text)
    try:
        found = find_engine(kind)
        if found.rollout is None:
            found.connect(url).close()
            return EngineAnswer(kind)
        server = found.rollout(url)
        return EngineAnswer(kind, server.check(), server.served_version())
    except WeightwireError as problem:
        return EngineAnswer(kind, problem=problem)
