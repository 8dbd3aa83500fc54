"""Fetches a version's files from the bucket and verifies their hashes.

Small files stay in memory, in reused buffers. Large files go to a temporary file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from weightwire.bucket import Bucket
from weightwire.chain import Commit, DataFile, Run, Sealed, SideFile, denied_means_missing
from weightwire.delta import Delta
from weightwire.errors import (
    BucketError,
    CorruptDelta,
    NoBucket,
    NotFound,
    OutputError,
    TooLarge,
    Truncated,
    WeightwireError,
)
from weightwire.system import Runtime

__all__ = ["LOST", "Fetched", "Fetcher", "StageListener", "fetch_side_file", "fetch_side_files", "missing_side_file"]

LOST = (NotFound, Truncated, CorruptDelta)
"""Errors of a file that is missing or damaged. Another path may avoid it."""

StageListener = Callable[[str, int, int, float], None]
"""Called for each file with the stage ("fetch", "verify"), the version, bytes and seconds."""

_IN_MEMORY = 64 << 20
_PIECE = 32 << 20  # bytes per read of a large file
_AHEAD = 4
_KEPT_BUFFERS = _AHEAD + 1


class Fetched:
    """The files of one version, as deltas. Pass it to `Fetcher.release` after use."""

    def __init__(self, deltas: Sequence[Delta], buffers: Sequence[bytearray], files: Sequence[BinaryIO]) -> None:
        self.deltas = deltas
        self._buffers = buffers
        self._files = files
        self.nbytes = sum(delta.nbytes for delta in deltas)

    def close(self) -> Sequence[bytearray]:
        """Closes its files and returns its buffers for reuse."""
        for file in self._files:
            file.close()
        return self._buffers


class Fetcher:
    """Reads files of a run. `spool` is the directory for large files."""

    def __init__(
        self, bucket: Bucket, runtime: Runtime, spool: Path | None = None, on_stage: StageListener | None = None
    ) -> None:
        self._bucket = bucket
        self._on_stage = on_stage or (lambda stage, version, nbytes, seconds: None)
        self._runtime = runtime
        self._spool = spool
        self._buffers: list[bytearray] = []
        self.on_read: Callable[[int], None] = lambda nbytes: None  # for progress bars
        self.lost: dict[str, WeightwireError] = {}  # by path: files that are missing or damaged

    @property
    def url(self) -> str:
        return self._bucket.url

    async def fetch(self, files: Sequence[DataFile], kind: str | None = None) -> Fetched:
        """Fetches all files of a version, which must be of this `kind`: deltas or anchors.

        Raises NotFound if one is missing, CorruptDelta or Truncated if one is damaged, and adds it to `lost`.
        """
        deltas: list[Delta] = []
        buffers: list[bytearray] = []
        spooled: list[BinaryIO] = []
        for file in files:
            where = f"{self._bucket.url}/{file.path}"
            with self.noting_lost((file,)):
                if file.size <= _IN_MEMORY:
                    buffers.append(self._buffer(file.size))
                    deltas.append(await self._to_memory(file, where, memoryview(buffers[-1])[: file.size]))
                else:
                    spooled.append(await self._to_file(file, where))
                    deltas.append(await self._runtime.run_in_thread(_open_spooled, spooled[-1], where))
                if kind is not None and deltas[-1].kind != kind:
                    deltas[-1].corrupt(f"not a file of kind {kind}")
        return Fetched(deltas, buffers, spooled)

    @contextmanager
    def noting_lost(self, files: Iterable[DataFile]) -> Iterator[None]:
        """Adds files to `lost` if they cannot be fetched or do not give the state in their record."""
        try:
            yield
        except NoBucket:
            raise  # the bucket failed, not the files
        except LOST as problem:
            self.lost.update((file.path, problem) for file in files)
            raise

    async def in_turn(self, commits: Sequence[Sealed[Commit]]) -> AsyncIterator[tuple[Sealed[Commit], Fetched]]:
        """Yields the files of some versions in order, and fetches the next ones ahead."""
        ahead: deque[asyncio.Task[Fetched]] = deque()
        waiting = deque(commits)
        try:
            for commit in commits:
                while waiting and (not ahead or (len(ahead) < _AHEAD and waiting[0].record.nbytes <= _IN_MEMORY)):
                    ahead.append(asyncio.create_task(self._fetch(waiting.popleft().record)))
                fetched = await ahead.popleft()
                yield commit, fetched
                self.release(fetched)
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _fetch(self, commit: Commit) -> Fetched:
        return await self.fetch(commit.files, commit.kind)

    def release(self, fetched: Fetched) -> None:
        """Takes its buffers back for reuse."""
        fetched.deltas = ()
        self._buffers += fetched.close()
        del self._buffers[:-_KEPT_BUFFERS]

    def _buffer(self, size: int) -> bytearray:
        for buffer in self._buffers:
            if len(buffer) >= size:
                self._buffers.remove(buffer)
                return buffer
        return bytearray(size)

    async def _to_memory(self, file: DataFile, where: str, view: memoryview) -> Delta:
        clock = self._runtime.clock
        began = clock()
        await self._read(file, view)
        fetched = clock()
        await self._runtime.run_in_thread(_check_bytes, view, file, where)
        self._on_stage("fetch", file.version, file.size, fetched - began)
        self._on_stage("verify", file.version, file.size, clock() - fetched)
        return await self._runtime.run_in_thread(Delta.from_bytes, view, where)

    async def _read(self, file: DataFile, view: memoryview, begin: int = 0) -> None:
        async with denied_means_missing(self._bucket, file.path):
            await self._bucket.read_into(file.path, view, begin)
        self.on_read(len(view))

    async def _to_file(self, file: DataFile, where: str) -> BinaryIO:
        try:
            spool: BinaryIO = tempfile.TemporaryFile(dir=self._spool)  # noqa: SIM115 (closed by Fetched.close)
        except OSError as problem:
            raise _no_room(where, problem) from problem
        clock, fetching = self._runtime.clock, 0.0
        began = clock()
        whole = hashlib.sha256()
        buffers = [memoryview(bytearray(min(_PIECE, file.size))) for _ in range(min(2, -(-file.size // _PIECE)))]
        keeping: asyncio.Task[None] | None = None  # of one piece, while the next is read
        try:
            for index, begin in enumerate(range(0, file.size, _PIECE)):
                piece = buffers[index % 2][: min(_PIECE, file.size - begin)]
                asked = clock()
                await self._read(file, piece, begin)
                fetching += clock() - asked
                if keeping is not None:
                    await keeping
                keeping = asyncio.create_task(self._runtime.run_in_thread(_keep, spool, piece, whole, where))
            if keeping is not None:
                await keeping
            await self._runtime.run_in_thread(_check_hash, whole, file, where)
        except BaseException:
            if keeping is not None:  # it still writes
                await asyncio.gather(keeping, return_exceptions=True)
            spool.close()
            raise
        self._on_stage("fetch", file.version, file.size, fetching)
        self._on_stage("verify", file.version, file.size, clock() - began - fetching)
        return spool


async def fetch_side_files(bucket: Bucket, run: Run) -> dict[str, bytes]:
    """A run's side files by name, verified."""
    return {file.name: await fetch_side_file(bucket, file) for file in run.files}


async def fetch_side_file(bucket: Bucket, file: SideFile) -> bytes:
    where = f"{bucket.url}/{file.path}"
    try:
        async with denied_means_missing(bucket, file.path):
            data = await bucket.get(file.path, file.size)
    except NoBucket:
        raise
    except NotFound as problem:
        raise missing_side_file(where, file.name) from problem
    except TooLarge as problem:
        raise CorruptDelta(f"{where}: corrupt: larger than its record says", hint=_copy(file.name)) from problem
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise CorruptDelta(f"{where}: corrupt: its hash does not match the record", hint=_copy(file.name))
    return data


def missing_side_file(where: str, name: str) -> NotFound:
    return NotFound(f"{where}: side file not found", hint=_copy(name))


def _copy(name: str) -> str:
    return f"copy {name} from a replica or the first checkpoint to this path, or start a new run under another URL"


def _keep(spool: BinaryIO, piece: memoryview, whole: hashlib._Hash, where: str) -> None:
    whole.update(piece)
    try:
        spool.write(piece)
        spool.flush()
    except OSError as problem:
        raise _no_room(where, problem) from problem


def _no_room(where: str, problem: OSError) -> OutputError:
    return OutputError(
        f"{where}: cannot be written to a temporary file ({problem.strerror})", hint="free some space, or set TMPDIR"
    )


def _check_bytes(data: memoryview, file: DataFile, where: str) -> None:
    _check_hash(hashlib.sha256(data), file, where)


def _check_hash(whole: hashlib._Hash, file: DataFile, where: str) -> None:
    if whole.hexdigest() != file.sha256:
        raise _not_as_published(where)


def _not_as_published(where: str) -> CorruptDelta:
    return CorruptDelta(f"{where}: corrupt: its hash does not match the record", hint="run `weightwire verify URL`")


def _open_spooled(spool: BinaryIO, where: str) -> Delta:
    def read(begin: int, end: int) -> bytes:
        data = os.pread(spool.fileno(), end - begin, begin)
        if len(data) != end - begin:
            raise BucketError(f"{where}: its temporary file was truncated")
        return data

    return Delta.remote(read, os.fstat(spool.fileno()).st_size, where)
