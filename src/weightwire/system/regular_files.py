"""Opens regular files only. A FIFO or a device in place of a file would block its reader for good."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["NotRegularFile", "open_regular", "read_regular"]


_SPECIAL = {errno.ENXIO, errno.ENODEV}  # a socket, or a device that does not exist


class NotRegularFile(FileNotFoundError):
    """A FIFO, a device, a socket or a directory is in place of a file. The file itself does not exist."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Does not wait, whatever is at the path."""
    # Opening a FIFO without O_NONBLOCK waits for its other end. For regular files the flag has no meaning.
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        if problem.errno not in _SPECIAL:
            raise
        raise _not_regular(path) from problem
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_regular(path: str | os.PathLike[str]) -> NotRegularFile:
    return NotRegularFile(errno.ENOENT, "not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file."""
    with open(open_regular(path), "rb") as file:
        return file.read()
