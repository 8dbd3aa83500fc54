"""Files that are whole after a power cut, or not there at all.

Knows files, directories and links, and in which order they must reach the disk; nothing of what is in them. What one of
these functions has done when it returns is done for good. Errors are the system's own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["clone_file", "flush", "lock_file", "make_directory", "point", "remove", "sync_tree", "write_file"]

_PARTIAL = ".partial"
_FICLONE = 0x40049409  # Linux: let two files share their blocks until one of them is written to
_CHUNK = 1 << 26


def lock_file(path: Path) -> int | None:
    """Takes a lock that the system drops when the process ends, however it does; None where another holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_directory(path: Path) -> None:
    """That a directory exists, and that it still does after a power cut."""
    if not path.is_dir():
        os.mkdir(path)
        _sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """A file with these bytes, in place of what was there."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            _write(fd, data)
            os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    _sync(path.parent)


def point(link: Path, target: str) -> None:
    """A symbolic link to `target`, in place of one to something else: whoever follows it finds one or the other."""
    partial = link.with_name(link.name + _PARTIAL)
    with suppress(FileNotFoundError):
        os.unlink(partial)
    os.symlink(target, partial)
    os.replace(partial, link)
    _sync(link.parent)


def clone_file(source: Path, copy: Path) -> bool:
    """Copies a file. True where the copy shares its blocks with the source, and so took no space (yet)."""
    with (
        _opened(source, os.O_RDONLY) as old,
        _opened(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new,
    ):
        shared = _share(old, new)
        if not shared:
            _copy(old, new)
        os.fsync(new)
    return shared


def _share(old: int, new: int) -> bool:
    try:
        fcntl.ioctl(new, _FICLONE, old)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return False
    return True


def _copy(old: int, new: int) -> None:
    """Within the kernel where it can."""
    size, done = os.fstat(old).st_size, 0
    if hasattr(os, "copy_file_range"):
        with suppress(OSError):  # not between these file systems: whatever else is wrong shows below
            while done < size and (more := os.copy_file_range(old, new, min(_CHUNK, size - done), done, done)):
                done += more
    os.lseek(new, done, os.SEEK_SET)
    while done < size and (data := os.pread(old, _CHUNK, done)):
        _write(new, data)
        done += len(data)


def sync_tree(path: Path) -> None:
    """A directory with all that is in it."""
    for parent, _, names in os.walk(path):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))
    _sync(path.parent)


def flush(memory: mmap.mmap, path: Path) -> None:
    """What was written to a file through a memory map."""
    memory.flush()
    _sync(path)


def remove(path: Path) -> None:
    """A file, a link, or a directory with all that is in it; nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    with suppress(FileNotFoundError):
        os.unlink(path)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
