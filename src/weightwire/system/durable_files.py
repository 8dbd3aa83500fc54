"""Files that are complete or absent after a power cut.

When one of these functions returns, its change is on disk. Errors are plain OSErrors.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightwire.system.regular_files import open_regular

__all__ = [
    "clone_file",
    "copy_tree",
    "flush",
    "lock_file",
    "make_directory",
    "point",
    "remove",
    "sync_directory",
    "sync_tree",
    "write_file",
]

_PARTIAL = ".partial"
_FICLONE = 0x40049409  # Linux: two files share their blocks until one of them is written
_CHUNK = 1 << 26


def lock_file(path: Path) -> int | None:
    """Takes a lock that the system releases when the process ends. None if another process holds it.

    Does not follow a link: the file may be created and written to. The holder may remove the file before it ends.
    """
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # removed since it was opened: the next one would lock another file


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def make_directory(path: Path) -> None:
    """Creates a directory that survives a power cut."""
    if not path.is_dir():
        os.mkdir(path)
        _sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Writes or replaces a file atomically."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        # Not O_TRUNC: a leftover of a crash is replaced, and nothing else at this name is written to.
        remove(partial)
        with _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            _write(fd, data)
            os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    _sync(path.parent)


def point(link: Path, target: str) -> None:
    """Points a symbolic link to `target`. Readers see the old or the new target."""
    partial = link.with_name(link.name + _PARTIAL)
    with suppress(FileNotFoundError):
        os.unlink(partial)
    os.symlink(target, partial)
    os.replace(partial, link)
    _sync(link.parent)


def clone_file(source: Path, copy: Path) -> bool:
    """Copies a file. True if the copy shares its blocks with the source and takes no space yet."""
    with (
        open(open_regular(source), "rb", buffering=0) as file,
        _opened(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as new,
    ):
        shared = _share(file.fileno(), new)
        if not shared:
            _copy(file.fileno(), new)
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
    """Copies inside the kernel if the file systems allow it."""
    size, done = os.fstat(old).st_size, 0
    if hasattr(os, "copy_file_range"):
        with suppress(OSError):  # not supported between these file systems; other errors show up below
            while done < size and (more := os.copy_file_range(old, new, min(_CHUNK, size - done), done, done)):
                done += more
    os.lseek(new, done, os.SEEK_SET)
    while done < size and (data := os.pread(old, _CHUNK, done)):
        _write(new, data)
        done += len(data)


def copy_tree(path: Path, copy: Path, *, without: Collection[str]) -> None:
    """Copies a directory without some of its files. `sync_tree` writes the copy to disk."""
    shutil.copytree(
        path, copy, ignore=lambda folder, names: set(without) & set(names) if Path(folder) == path else set()
    )


def sync_tree(path: Path) -> None:
    """Syncs a directory and everything in it."""
    for parent, _, names in os.walk(path):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))
    _sync(path.parent)


def sync_directory(path: Path) -> None:
    """Syncs the names of the files in a directory, and its own name."""
    _sync(path)
    _sync(path.parent)


def flush(memory: mmap.mmap, path: Path) -> None:
    """Syncs a file that was written through a memory map."""
    if sys.platform != "linux":  # there, fsync includes what was written through maps
        memory.flush()  # no other thread runs meanwhile
    _sync(path)


def remove(path: Path) -> None:
    """Removes a file, a link or a directory tree, if it exists."""
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
    with _opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:  # never waits for the other end of a FIFO
        os.fsync(fd)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
