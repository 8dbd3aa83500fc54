"""Simulates the state of a disk after a crash or a power cut, at every step of code that writes files.

A killed process leaves everything that it wrote. A power cut keeps what was synced; everything else may be old, new,
empty, truncated, or a mixture of pages.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from weightwire import codec
from weightwire.system import durable_files

PAGE = 4096

# All functions with which the code changes files and memory maps.
STEPS = [
    (os, "copy_file_range"),
    (os, "fsync"),
    (os, "mkdir"),
    (os, "posix_fallocate"),
    (os, "pwrite"),
    (os, "replace"),
    (os, "rmdir"),
    (os, "symlink"),
    (os, "unlink"),
    (os, "write"),
    (durable_files, "flush"),
    (codec, "apply"),
    (codec, "swap"),
]

Step = Callable[[str], None]


@contextmanager
def at_every_step(before: Step, after: Callable[[str, tuple[Any, ...]], None] | None = None) -> Iterator[None]:
    """Calls `before` with the name of every step, and `after` also with its arguments."""
    busy = False  # calls by the callbacks do not count

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if busy:
                return real(*args, **kwargs)
            busy = True
            try:
                before(name)
            finally:
                busy = False
            result = real(*args, **kwargs)
            if after:
                busy = True
                try:
                    after(name, args)
                finally:
                    busy = False
            return result

        return step

    with pytest.MonkeyPatch.context() as patched:
        for module, name in STEPS:
            if hasattr(module, name):
                patched.setattr(module, name, wrap(name, getattr(module, name)))
        yield


@dataclass(frozen=True)
class Entry:
    """A directory entry."""

    kind: str  # file, folder or link
    inode: int
    target: str = ""


Names = dict[str, Entry]


@dataclass
class Disk:
    """Watches a directory, and copies the state that a power cut would leave."""

    root: Path
    names: dict[int, Names] = field(default_factory=dict)  # of each directory, when it was last synced
    synced: dict[int, bytes] = field(default_factory=dict)  # of each file, when it was last synced
    since: dict[int, list[bytes]] = field(default_factory=dict)  # and all later contents
    pinned: dict[int, int] = field(default_factory=dict)

    def __enter__(self) -> Self:
        """Treats everything that exists now as synced."""
        for path in [self.root, *self.root.rglob("*")]:
            if not path.is_symlink():
                self._sync(path)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.pinned.values():
            os.close(fd)

    def after(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync":
            self._sync(Path(f"/proc/self/fd/{args[0]}"))
        self._look()

    def _look(self) -> None:
        for path in [path for path in self.root.rglob("*") if not path.is_symlink()]:
            inode = path.stat().st_ino
            if inode not in self.pinned:
                self.pinned[inode] = os.open(path, os.O_RDONLY)  # prevents reuse of its number
            if path.name == "model.safetensors" and inode in self.synced:
                data, known = path.read_bytes(), [self.synced[inode], *self.since.get(inode, [])]
                if data not in known:
                    self.since[inode] = [*known[1:], data]

    def _sync(self, path: Path) -> None:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            self.names[info.st_ino] = _list(path)
        else:
            self.synced[info.st_ino] = path.read_bytes()
            self.since.pop(info.st_ino, None)

    def cut(self, copy: Path, seed: int) -> None:
        """One of the possible states after a power cut now."""
        self._look()
        self._cut(self.root, self.root.stat().st_ino, copy, random.Random(seed))

    def _cut(self, path: Path | None, inode: int, copy: Path, rng: random.Random) -> None:
        copy.mkdir()
        now, then = _list(path) if path else {}, self.names.get(inode, {})
        for name in sorted({*now, *then}):
            entry = rng.choice([now.get(name), then.get(name)])
            if entry is None:
                continue
            here = path / name if path and now.get(name) == entry else None
            if entry.kind == "link":
                (copy / name).symlink_to(entry.target)
            elif entry.kind == "folder":
                self._cut(here, entry.inode, copy / name, rng)
            else:
                (copy / name).write_bytes(self._content(here, entry.inode, rng))

    def _content(self, here: Path | None, inode: int, rng: random.Random) -> bytes:
        synced = self.synced.get(inode)
        if here is None:
            return synced or b""
        now = here.read_bytes()
        if synced is None:
            return rng.choice([b"", now, now[: rng.randrange(len(now) + 1)], bytes(len(now))])
        if len(synced) != len(now):
            return rng.choice([synced, now])
        choices = [synced, now, *self.since.get(inode, [])]
        pages = [rng.choice(choices)[at : at + PAGE] for at in range(0, len(now), PAGE)]
        return b"".join(pages)


def _list(path: Path) -> Names:
    return {entry.name: _entry(Path(path, entry.name)) for entry in path.iterdir()}


def _entry(path: Path) -> Entry:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return Entry("link", info.st_ino, os.readlink(path))
    return Entry("folder" if stat.S_ISDIR(info.st_mode) else "file", info.st_ino)


def copied(root: Path, copy: Path) -> None:
    """A copy of the state that a killed process leaves now."""
    shutil.copytree(root, copy, symlinks=True)
