"""A directory as a bucket: on one machine, or on a file system that all machines share.

An object is a file. It is written under a hidden name, synced, and then appears at once: a hard link creates it only
where nothing is, a rename replaces. Knows files and folders; nothing of networks or of what the bytes mean.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weightwire.bucket.bucket import ObjectInfo
from weightwire.bucket.concurrency import each, flat, in_thread, pieces
from weightwire.bucket.paths import PARTIAL, check_path, check_prefix, is_path
from weightwire.errors import AlreadyExists, BucketError, NotFound, PermissionDenied, Truncated, Unavailable

__all__ = ["DirectoryBucket"]

# Large files are read in pieces, several at a time: file systems on a network gain by it.
_PIECE = 32 << 20
_AT_ONCE = 4

_ABANDONED = 24 * 3600.0
_KNOWN_FOLDERS = 1000
_ATTEMPTS = 100

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_IMPOSSIBLE = {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ELOOP, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF}


class DirectoryBucket:
    """A `Bucket` in a directory, which the first write makes."""

    url: str
    strict = True
    poll_interval = 0.2

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = self._root.as_uri()
        # Folders that this process has made sure of; they need no sync again.
        self._durable: set[Path] = set()

    async def create(self, path: str, data: bytes) -> None:
        target = self._at(path)
        with self._writing(path):
            await in_thread(lambda: self._write(target, [memoryview(data)], _link))

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        target, stop = self._at(path), threading.Event()
        with self._writing(path):
            await in_thread(lambda: self._write(target, pieces(data, path, size, stop), os.replace), stop)

    async def get(self, path: str) -> bytes:
        target = self._at(path)
        with self._reading(path):
            return await in_thread(lambda: _read(target))

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        target, view = self._at(path), flat(buffer)

        async def read(offset: int) -> None:
            await in_thread(lambda: _fill(target, view[offset : offset + _PIECE], start + offset))

        with self._reading(path):
            await each(range(0, max(len(view), 1), _PIECE), _AT_ONCE, read)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = self._root / check_prefix(prefix)
        with self._reading(prefix):
            return await in_thread(lambda: sorted(_walk(self._root, folder), key=lambda found: found.path))

    async def find(self, path: str) -> ObjectInfo | None:
        target = self._at(path)
        try:
            with self._reading(path):
                status = await in_thread(target.stat)
        except NotFound:
            return None
        return ObjectInfo(path, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    async def delete(self, path: str) -> None:
        target = self._at(path)
        with suppress(NotFound), self._reading(path):
            await in_thread(lambda: self._remove(target))

    async def close(self) -> None:
        """Nothing is open."""

    def _at(self, path: str) -> Path:
        """Where an object lies: below the root, and not somewhere else by way of a link."""
        target = self._root / check_path(path)
        if os.path.realpath(target) != os.path.join(os.path.realpath(self._root), path):
            raise BucketError(f"{self.url}/{path}: there is a symbolic link on the way", hint="remove it")
        return target

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as problem:
            raise NotFound(f"{self.url}/{path}: is not there", hint="check the URL, or wait for it") from problem
        except OSError as problem:
            raise _explain(problem, f"{self.url}/{path}") from problem

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise _explain(problem, f"{self.url}/{path}") from problem

    # In threads

    def _write(self, target: Path, views: Iterable[memoryview], publish: Callable[[Path, Path], None]) -> None:
        """A file that is there with all its bytes or not at all, even if the power goes."""
        partial, descriptor = self._open_partial(target.parent)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for view in views:
                    _write_all(file.fileno(), view)
                os.fsync(file.fileno())
            publish(partial, target)
        finally:
            # A rename has moved it. What cannot be removed now, a later listing sweeps up.
            with suppress(OSError):
                partial.unlink()
        _sync_folder(target.parent)

    def _open_partial(self, folder: Path) -> tuple[Path, int]:
        """In the folder of the target, which may be on a file system of its own."""
        partial = folder / f"{PARTIAL}{secrets.token_hex(8)}.partial"
        attempts = 0
        while True:
            try:
                self._make_folder(folder)
                return partial, os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                # Someone has deleted the last object of a folder, and the folder with it, while we came.
                self._durable.clear()
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise

    def _make_folder(self, folder: Path) -> None:
        """A folder that survives a power cut with all above it, whoever made them."""
        if folder in self._durable:
            return
        if folder == self._root:
            _make_root(folder)
        else:
            self._make_folder(folder.parent)
            with suppress(FileExistsError):
                folder.mkdir()
            _sync_folder(folder.parent)
        if len(self._durable) >= _KNOWN_FOLDERS:
            self._durable.clear()
        self._durable.add(folder)

    def _remove(self, target: Path) -> None:
        if not target.is_file():
            return
        target.unlink()
        # A run would leave an empty folder for each of its versions.
        folder = target.parent
        with suppress(OSError):
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent


def _make_root(root: Path) -> None:
    missing = []
    folder = root
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems have no such call: with them the server has written the name already.
        if problem.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _link(partial: Path, target: Path) -> None:
    try:
        os.link(partial, target)
    except OSError as problem:
        if problem.errno not in _NO_LINKS:
            raise
        raise BucketError(
            f"{target}: the file system has no hard links ({problem.strerror}), so nothing can be created all at once",
            hint="use a directory on another file system, or an s3://, gs:// or az:// bucket",
        ) from problem


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _fill(path: Path, view: memoryview, start: int) -> None:
    with path.open("rb", buffering=0) as file:
        size, wanted = os.fstat(file.fileno()).st_size, len(view)
        while view:
            count = os.preadv(file.fileno(), [view], start)
            if count == 0:
                raise Truncated(
                    f"{path}: has only {size:,} bytes where {start + wanted:,} were expected",
                    hint="it was cut off, or is not the file it should be",
                )
            view, start, wanted = view[count:], start + count, wanted - count


def _read(target: Path) -> bytes:
    with open(os.open(target, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(errno.ENOENT, "is no file")
        return file.read()


def _walk(root: Path, folder: Path) -> Iterator[ObjectInfo]:
    """All objects below a folder. Files come and go meanwhile: those that are gone are left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        with suppress(FileNotFoundError):
            if entry.name.startswith(PARTIAL):
                _sweep(entry)
            elif entry.is_dir(follow_symlinks=False):
                yield from _walk(root, Path(entry.path))
            elif entry.is_file(follow_symlinks=False) and is_path(
                path := Path(entry.path).relative_to(root).as_posix()
            ):
                status = entry.stat(follow_symlinks=False)
                yield ObjectInfo(path, status.st_size, status.st_mtime)


def _sweep(entry: os.DirEntry[str]) -> None:
    """Removes what a writer left that was killed; no writer takes a day from one write to the next."""
    with suppress(OSError):
        if time.time() - entry.stat().st_mtime > _ABANDONED:
            os.unlink(entry)


def _explain(problem: OSError, where: str) -> BucketError:
    reason = problem.strerror or str(problem)
    if problem.errno == errno.EEXIST:
        return AlreadyExists(f"{where}: exists", hint="nothing was changed")
    if problem.errno in _FULL:
        return Unavailable(f"{where}: {reason}", hint="free some space on that file system")
    if problem.errno in _FORBIDDEN:
        return PermissionDenied(f"{where}: {reason}", hint="check who owns the directory and who may write there")
    if problem.errno in _IMPOSSIBLE:
        return BucketError(f"{where}: {reason}", hint="another file is in the way, or the name is not possible there")
    return Unavailable(f"{where}: {reason}", hint="check the file system: is it mounted and healthy?")
