"""Errors of the disk under a replica, which say what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import ReplicaError

__all__ = ["check_room", "explained"]

_NO_ROOM = "free some space, and go on"
_HINTS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _NO_ROOM)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns errors of the system into errors that say what to do."""
    try:
        yield
    except OSError as problem:
        raise ReplicaError(
            f"{problem.filename or directory}: {problem.strerror or problem}",
            hint=_HINTS.get(problem.errno or 0, "check that the directory is on a disk that works, and may be written"),
        ) from problem


def check_room(directory: Path, needed: int) -> None:
    """A page for which there is no room any more would be a SIGBUS, and not an error."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ReplicaError(f"{directory}: {needed:,} bytes are needed, {free:,} are free", hint=_NO_ROOM)
