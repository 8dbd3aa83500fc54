"""Disk errors of a replica, with hints."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import ReplicaError

__all__ = ["check_room", "explained"]

_NO_ROOM = "free some space, then try again"
_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _NO_ROOM),
    errno.ELOOP: "remove the symbolic link, or use a new directory",
}


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns an OSError into a ReplicaError with a hint."""
    try:
        yield
    except OSError as problem:
        raise ReplicaError(
            f"{problem.filename or directory}: {problem.strerror or problem}",
            hint=_HINTS.get(problem.errno or 0, "check that the disk works and the directory is writable"),
        ) from problem


def check_room(directory: Path, needed: int) -> None:
    """Checks free space up front: a mapped page without space raises SIGBUS instead of an error."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ReplicaError(f"{directory}: {needed:,} bytes are needed, {free:,} are free", hint=_NO_ROOM)
