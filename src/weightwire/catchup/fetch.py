"""Fetches a version's files from the bucket, and verifies their hashes.

Small ones stay in memory, in buffers that are used again; large ones go to a temporary file.
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
from weightwire.chain import Commit, DataFile, Run, Sealed, denied_means_missing
from weightwire.delta import Delta
from weightwire.errors import BucketError, CorruptDelta, NoBucket, NotFound, OutputError, Truncated, WeightwireError
from weightwire.system import Runtime

__all__ = ["LOST", "Fetched", "Fetcher", "StageListener", "fetch_side_files"]

LOST = (NotFound, Truncated, CorruptDelta)
"""What is said of a file that is gone or damaged. Another way may lead past it."""

StageListener = Callable[[str, int, int, float], None]
"""Hears of each file: the stage ("fetch", "verify"), the version, bytes and seconds."""

_IN_MEMORY = 64 << 20
_PIECE = 32 << 20  # of what goes to a file
_AHEAD = 4
_KEPT_BUFFERS = _AHEAD + 1


class Fetched:
    """The files of one version, as deltas. Pass it to `Fetcher.release` when they are no longer needed."""

    def __init__(self, deltas: Sequence[Delta], buffers: Sequence[bytearray], files: Sequence[BinaryIO]) -> None:
        self.deltas = deltas
        self._buffers = buffers
        self._files = files
        self.nbytes = sum(delta.nbytes for delta in deltas)

    def close(self) -> Sequence[bytearray]:
        """Closes its files; returns its buffers, which may be used again."""
        for file in self._files:
            file.close()
        return self._buffers


class Fetcher:
    """Reads files of a run. `spool` is a directory for what is too large to be held in memory."""

    def __init__(
        self, bucket: Bucket, runtime: Runtime, spool: Path | None = None, on_stage: StageListener | None = None
    ) -> None:
        self._bucket = bucket
        self._on_stage = on_stage or (lambda stage, version, nbytes, seconds: None)
        self._runtime = runtime
        self._spool = spool
        self._buffers: list[bytearray] = []
        self.lost: dict[str, WeightwireError] = {}  # files that are gone or damaged, and what was said of them

    async def fetch(self, files: Sequence[DataFile], kind: str | None = None) -> Fetched:
        """All files of a version, which must be deltas or anchors: `kind`.

        Raises NotFound if one is gone, CorruptDelta or Truncated if one is damaged; it is `lost` then.
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
                    deltas[-1].corrupt(f"is no {kind}")
        return Fetched(deltas, buffers, spooled)

    @contextmanager
    def noting_lost(self, files: Iterable[DataFile]) -> Iterator[None]:
        """Files that cannot be fetched, or do not lead to the state that their record names, are lost."""
        try:
            yield
        except NoBucket:
            raise  # of the files themselves this says nothing
        except LOST as problem:
            self.lost.update((file.path, problem) for file in files)
            raise

    async def in_turn(self, commits: Sequence[Sealed[Commit]]) -> AsyncIterator[tuple[Sealed[Commit], Fetched]]:
        """The files of some versions, in order; the next ones are fetched while the first are dealt with."""
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
        """Gives its buffers back, to be used again."""
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

    async def _to_file(self, file: DataFile, where: str) -> BinaryIO:
        try:
            spool: BinaryIO = tempfile.TemporaryFile(dir=self._spool)  # noqa: SIM115 (closed with what was fetched)
        except OSError as problem:
            raise _no_room(where, problem) from problem
        clock, fetching = self._runtime.clock, 0.0
        began = clock()
        whole = hashlib.sha256()
        buffer = memoryview(bytearray(min(_PIECE, file.size)))
        for begin in range(0, file.size, _PIECE):
            piece = buffer[: min(_PIECE, file.size - begin)]
            asked = clock()
            await self._read(file, piece, begin)
            fetching += clock() - asked
            await self._runtime.run_in_thread(_keep, spool, piece, whole, where)
        await self._runtime.run_in_thread(_check_hash, whole, file, where)
        self._on_stage("fetch", file.version, file.size, fetching)
        self._on_stage("verify", file.version, file.size, clock() - began - fetching)
        return spool


async def fetch_side_files(bucket: Bucket, run: Run) -> dict[str, bytes]:
    """What a run's checkpoints hold besides weights, by name, and verified."""
    found: dict[str, bytes] = {}
    for file in run.files:
        async with denied_means_missing(bucket, file.path):
            data = found[file.name] = await bucket.get(file.path)
        if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
            raise _not_as_published(f"{bucket.url}/{file.path}")
    return found


def _keep(spool: BinaryIO, piece: memoryview, whole: hashlib._Hash, where: str) -> None:
    whole.update(piece)
    try:
        spool.write(piece)
        spool.flush()
    except OSError as problem:
        raise _no_room(where, problem) from problem


def _no_room(where: str, problem: OSError) -> OutputError:
    return OutputError(
        f"{where}: cannot be kept in a temporary file ({problem.strerror})", hint="free some space, or set TMPDIR"
    )


def _check_bytes(data: memoryview, file: DataFile, where: str) -> None:
    _check_hash(hashlib.sha256(data), file, where)


def _check_hash(whole: hashlib._Hash, file: DataFile, where: str) -> None:
    if whole.hexdigest() != file.sha256:
        raise _not_as_published(where)


def _not_as_published(where: str) -> CorruptDelta:
    return CorruptDelta(f"{where}: its bytes are not those that were published", hint="run `weightwire verify`")


def _open_spooled(spool: BinaryIO, where: str) -> Delta:
    def read(begin: int, end: int) -> bytes:
        data = os.pread(spool.fileno(), end - begin, begin)
        if len(data) != end - begin:
            raise BucketError(f"{where}: its temporary file was cut short")
        return data

    return Delta.remote(read, os.fstat(spool.fileno()).st_size, where)
