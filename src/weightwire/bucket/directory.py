"""A directory as a bucket: on one machine, or on a file system that machines share.

An object is a file. It is written and synced under a hidden name and then appears atomically: a hard link creates it
only if the name is free, a rename replaces it.
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

from weightwire.bucket.bucket import GET_LIMIT, ObjectInfo
from weightwire.bucket.concurrency import each, flat, in_thread, pieces
from weightwire.bucket.paths import PARTIAL, check_path, check_prefix, is_path
from weightwire.errors import AlreadyExists, BucketError, NotFound, PermissionDenied, TooLarge, Truncated, Unavailable
from weightwire.system import NotRegularFile, open_regular

__all__ = ["DirectoryBucket"]

# Large files are read in pieces, several at a time: network file systems are faster that way.
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
    """A `Bucket` in a directory. The first write creates the directory."""

    url: str
    strict = True
    poll_interval = 0.2

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        # A plain path, as people write it. Bytes that are not UTF-8 are escaped: a URL goes into JSON.
        self.url = str(self._root).encode("utf-8", "backslashreplace").decode()
        # Folders that this process has synced already.
        self._durable: set[Path] = set()

    async def create(self, path: str, data: bytes) -> None:
        target = self._at(path)
        with self._writing(path):
            await in_thread(lambda: self._write(target, [memoryview(data)], _link))

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        target, stop = self._at(path), threading.Event()
        with self._writing(path):
            await in_thread(lambda: self._write(target, pieces(data, path, size, stop), os.replace), stop)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        target = self._at(path)
        with self._reading(path):
            return await in_thread(lambda: _read(target, limit, f"{self.url}/{path}"))

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        target, view = self._at(path), flat(buffer)

        async def read(offset: int) -> None:
            where = f"{self.url}/{path}"
            await in_thread(lambda: _fill(target, view[offset : offset + _PIECE], start + offset, where))

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
        """Does nothing: no file stays open."""

    def _at(self, path: str) -> Path:
        """The file of an object. Symbolic links, which could lead out of the root, are rejected."""
        target = self._root / check_path(path)
        if os.path.realpath(target) != os.path.join(os.path.realpath(self._root), path):
            raise BucketError(f"{self.url}/{path}: the path contains a symbolic link", hint="remove the link")
        return target

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except NotRegularFile as problem:
            # Absent, as in listings: readers look for another path, and look again later.
            raise NotFound(f"{self.url}/{path}: not a regular file", hint="remove what is in its place") from problem
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as problem:
            raise NotFound.at(f"{self.url}/{path}") from problem
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
        """Writes a file that is complete or absent, even after a power cut."""
        partial, descriptor = self._open_partial(target.parent)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for view in views:
                    _write_all(file.fileno(), view)
                os.fsync(file.fileno())
            publish(partial, target)
        finally:
            # After a rename it is gone already. A later listing removes it if this fails.
            with suppress(OSError):
                partial.unlink()
        _sync_folder(target.parent)

    def _open_partial(self, folder: Path) -> tuple[Path, int]:
        """Opens a hidden file in the folder of the target: both must be on one file system."""
        partial = folder / f"{PARTIAL}{secrets.token_hex(8)}.partial"
        attempts = 0
        while True:
            try:
                self._make_folder(folder)
                return partial, os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                # Another process deleted the last object of the folder, and the folder with it.
                self._durable.clear()
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise

    def _make_folder(self, folder: Path) -> None:
        """Creates a folder and its parents, and syncs them even if another process created them."""
        missing = []
        while folder not in self._durable and folder != self._root:
            missing.append(folder)
            folder = folder.parent
        if folder not in self._durable:
            _make_root(folder)
            self._note_durable(folder)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
            _sync_folder(folder.parent)
            self._note_durable(folder)

    def _note_durable(self, folder: Path) -> None:
        if len(self._durable) >= _KNOWN_FOLDERS:
            self._durable.clear()
        self._durable.add(folder)

    def _remove(self, target: Path) -> None:
        if not target.is_file():
            return
        target.unlink()
        # Otherwise a run would leave an empty folder for each version.
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
    try:
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
            _sync_folder(folder.parent)
    except OSError as problem:
        raise _explain(problem, f"cannot create {root}") from problem
    if root.exists() and not root.is_dir():
        raise BucketError(f"{root}: not a directory", hint="name a directory")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems do not support this; their server has stored the name already.
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
            f"{target}: the file system does not support hard links ({problem.strerror}), which an atomic create needs",
            hint="use a directory on another file system, or an s3://, gs:// or az:// bucket",
        ) from problem


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _fill(path: Path, view: memoryview, start: int, where: str) -> None:
    with open(open_regular(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        size, wanted = os.fstat(file.fileno()).st_size, len(view)
        while view:
            count = os.preadv(file.fileno(), [view], start)
            if count == 0:
                raise Truncated.at(where, size, start + wanted)
            view, start, wanted = view[count:], start + count, wanted - count


def _read(target: Path, limit: int, where: str) -> bytes:
    with open(open_regular(target, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(size, limit) + 1)
    if max(size, len(data)) > limit:
        raise TooLarge.at(where, limit)
    return data


def _walk(root: Path, folder: Path) -> Iterator[ObjectInfo]:
    """All objects below a folder. Skips files that disappear meanwhile."""
    waiting = [folder]  # not recursive: folders may be nested deeper than Python's stack
    while waiting:
        for entry in _entries(waiting.pop()):
            with suppress(FileNotFoundError):
                if entry.name.startswith(PARTIAL):
                    _sweep(entry)
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False) and is_path(
                    path := Path(entry.path).relative_to(root).as_posix()
                ):
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(path, status.st_size, status.st_mtime)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        if problem.errno != errno.ENAMETOOLONG:
            raise
        return []  # nested so deep that no path leads to what is in it


def _sweep(entry: os.DirEntry[str]) -> None:
    """Removes the partial file of a killed writer. No live writer pauses for a day between two writes."""
    with suppress(OSError):
        if time.time() - entry.stat().st_mtime > _ABANDONED:
            os.unlink(entry)


def _explain(problem: OSError, where: str) -> BucketError:
    reason = problem.strerror or str(problem)
    if problem.errno == errno.EEXIST:
        return AlreadyExists.at(where)
    if problem.errno in _FULL:
        return Unavailable(f"{where}: {reason}", hint="free space on that file system")
    if problem.errno in _FORBIDDEN:
        return PermissionDenied(f"{where}: {reason}", hint="check the owner and the permissions of the directory")
    if problem.errno in _IMPOSSIBLE:
        return BucketError(
            f"{where}: {reason}", hint="another file has this name, or the file system does not support the name"
        )
    return Unavailable(f"{where}: {reason}", hint="check that the file system is mounted and healthy")
