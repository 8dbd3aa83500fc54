"""The disk of one simulated machine. A crash may come at any step that writes, and take unsynced writes with it."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.disk import Disk, at_every_step, copied


class PowerCut(BaseException):
    """The machine stops at this step. Nothing that happens afterwards reaches the disk."""


class SimDisk(Disk):
    """Remembers what was synced. `fuse` is the number of steps until the crash.

    With `is_power`, a crash loses writes that were not synced. Otherwise only the process ends, and all writes last.
    """

    _now: SimDisk | None = None  # the disk of the process that runs; only one runs at a time

    def __init__(self, root: Path, rng: random.Random, failing: Callable[[], bool]) -> None:
        super().__init__(root)
        self._rng = rng
        self._failing = failing  # whether the next flush fails
        self._image: Path | None = None  # the disk after the crash
        self.is_power = False
        self.fuse: int | None = None
        root.mkdir()
        self.__enter__()

    @property
    def is_down(self) -> bool:
        return self._image is not None

    @classmethod
    @contextmanager
    def watching(cls) -> Iterator[None]:
        """Watches all steps that write. Each counts for the disk that is `in_use`."""

        def before(name: str) -> None:
            if cls._now is not None:
                cls._now._step(name)

        def after(name: str, args: tuple[Any, ...]) -> None:
            if cls._now is not None and name == "fsync":
                cls._now._sync(Path(f"/proc/self/fd/{args[0]}"))

        with at_every_step(before, after):
            yield

    @contextmanager
    def in_use(self) -> Iterator[None]:
        previous, SimDisk._now = SimDisk._now, self
        try:
            yield
        finally:
            SimDisk._now = previous

    def _step(self, name: str) -> None:
        if name == "flush" and self._failing():
            self._drop_pages()
            raise OSError(errno.EIO, "the disk failed")
        if self.fuse is None:
            return
        self.fuse -= 1
        if self.fuse < 0:
            self.crash(halfway=True)
            raise PowerCut

    def _drop_pages(self) -> None:
        """After a failed flush, the system may read old pages from the disk again."""
        model = self.root / "work/model.safetensors"
        synced = self.synced.get(model.stat().st_ino) if model.exists() else None
        if synced is not None:
            with model.open("r+b") as file:
                file.write(synced)

    def _look(self) -> None:
        """Inode numbers are not reused in a tmpfs, and two contents of a page are enough."""

    def crash(self, *, halfway: bool = False) -> None:
        """Decides what is left, at the first call after `repair`. After a step `halfway`, code may still clean up."""
        self.fuse = None
        if self._image is not None or not (self.is_power or halfway):
            return
        self._image = self.root.with_name(f"{self.root.name}.after")
        if self.is_power:
            self.cut(self._image, self._rng.getrandbits(32))
        else:
            copied(self.root, self._image)

    def repair(self) -> None:
        """Starts the machine again. Everything that is left is on the disk."""
        if self._image is None:
            return
        shutil.rmtree(self.root)
        os.rename(self._image, self.root)
        self._image = None
        self.names.clear()
        self.synced.clear()
        self.__enter__()

    def rot(self, path: Path) -> None:
        """Flips a bit of a file."""
        data = bytearray(path.read_bytes())
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(data)
        self._sync(path)
