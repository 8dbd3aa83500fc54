"""The directory in shared memory that a follower and its server share. One follower at a time may use it.

A server has such a directory for each of its models that follows a run: the one it serves, and a draft. Their followers
update the server one at a time.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from weightwire.delta import Delta
from weightwire.errors import Closed, EngineError
from weightwire.system import durable_files

__all__ = ["PAUSED", "SharedDirectory"]

PAUSED = "paused"
"""The file that marks a paused server. It stays when a follower ends, because a later one has to resume the server."""

_SHARED_MEMORY = Path("/dev/shm")
_LOCK = "lock"
_SESSION = ".session"
_LOOK = 0.002  # seconds
_OLD = 60.0  # seconds; a younger directory may belong to a follower that is just starting
_TRIES = 10  # to lock a directory that another follower removes at the same time


class SharedDirectory:
    """Call `lock` before its first use, and `close` at the end, which removes it. Any thread may call them."""

    def __init__(self, path: Path, owner: str, part: str = "") -> None:
        """`path` is that of the server, and `part` its model. `owner` is the engine's name, for errors."""
        self.path = path.with_name(f"{path.name}-{part}") if part else path
        self._of_server = path
        self._owner = owner
        self._lock_file: int | None = None
        self._is_closed = False
        self._mutex = threading.Lock()

    @classmethod
    def for_port(cls, port: int, owner: str, part: str = "") -> Self:
        """The directory of the server at a local port. Not by URL: the same server may have several names."""
        shared = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        return cls(shared / f"weightwire-{os.getuid()}-{port}", owner, part)

    @property
    def paused_mark(self) -> Path:
        """Marks that the server was paused for an update of the model that it serves."""
        return self._of_server / PAUSED

    @contextmanager
    def session(self) -> Iterator[None]:
        """Waits until no other follower updates the server, and keeps the others waiting."""
        path = self._of_server.with_name(f"{self._of_server.name}{_SESSION}")
        while (lock := self._session_lock(path)) is None:
            time.sleep(_LOOK)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(lock)

    def _session_lock(self, path: Path) -> int | None:
        if self._is_closed:
            raise Closed(f"{self._owner}: this engine is closed", hint="open it again")
        try:
            return durable_files.lock_file(path)
        except OSError as problem:
            raise _unusable(path, problem) from problem

    @contextmanager
    def staged(self, patch: Delta, version: int) -> Iterator[Path]:
        """Writes a patch for the workers to read. Removes it at the end."""
        file = self.path / f"{version}.safetensors"
        try:
            with file.open("wb") as out:
                for chunk in patch.chunks():
                    out.write(chunk)
            yield file
        except OSError as problem:
            raise EngineError(
                f"{file}: the patch cannot be written ({problem.strerror})", hint="free some shared memory"
            ) from problem
        finally:
            file.unlink(missing_ok=True)

    def lock(self) -> None:
        """Locks the engine for this follower, and removes leftovers of a killed one."""
        with self._mutex:
            if self._is_closed:  # by a thread that still worked for the engine when it was closed
                raise Closed(f"{self._owner}: this engine is closed", hint="open it again")
            self._lock()

    def close(self) -> None:
        """Releases it for good."""
        with self._mutex:
            self._is_closed = True
            self._release()

    def _lock(self) -> None:
        if self._lock_file is not None and self.path.is_dir():
            return
        self._unlock()
        try:
            self._lock_file = self._take()
        except OSError as problem:
            raise _unusable(self.path, problem) from problem
        if self._lock_file is None:
            raise EngineError(
                f"{self._owner}: another follower updates this engine", hint="stop that follower, or drop --engine here"
            )
        self._remove_leftovers()
        self._remove_abandoned()

    def _release(self) -> None:
        """Removes the directory, unless the server is left paused."""
        if self._lock_file is not None and self.path.is_dir():
            self._remove()
        self._unlock()

    def _remove(self) -> None:
        with suppress(OSError):
            self._remove_leftovers()
            if not (self.path / PAUSED).exists():
                (self.path / _LOCK).unlink(missing_ok=True)
                self.path.rmdir()

    def _remove_abandoned(self) -> None:
        """Removes the directories of followers that were killed and never started again for the same server."""
        prefix = self.path.name.rpartition("-")[0] + "-"
        for path in self.path.parent.glob(f"{prefix}*"):
            abandoned = SharedDirectory(path, self._owner)
            with suppress(OSError):
                if path == self.path or time.time() - path.stat().st_mtime <= _OLD:
                    continue
                if path.suffix == _SESSION and (lock := durable_files.lock_file(path)) is not None:
                    path.unlink()
                    os.close(lock)
                elif (path / _LOCK).is_file():
                    abandoned._lock_file = durable_files.lock_file(path / _LOCK)
                    abandoned._release()

    def _take(self) -> int | None:
        for _ in range(_TRIES):
            self.path.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                return durable_files.lock_file(self.path / _LOCK)
        return None

    def _remove_leftovers(self) -> None:
        for path in self.path.iterdir():
            if path.name not in (_LOCK, PAUSED):
                path.unlink(missing_ok=True)

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _unusable(path: Path, problem: OSError) -> EngineError:
    return EngineError(f"{path}: cannot be used ({problem.strerror})", hint="check its owner and the free space")
