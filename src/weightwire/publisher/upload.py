"""Uploads deltas and anchors, with retries."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from weightwire.bucket import Bucket
from weightwire.chain import DataFile, FileHead, Warn, backoff, data_path
from weightwire.delta import Delta
from weightwire.errors import BucketError, NotFound, PermissionDenied
from weightwire.system import Runtime
from weightwire.telemetry import StartProgress

__all__ = ["Uploader"]

Result = TypeVar("Result")

_CHUNK = 256 << 10  # small: the allocator keeps freed memory for each thread


def _never() -> bool:
    return False


class Uploader:
    """Retries failed requests for `retry_seconds`."""

    def __init__(
        self, bucket: Bucket, runtime: Runtime, retry_seconds: float, warn_of_retry: Warn, progress: StartProgress
    ) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._retry_seconds = retry_seconds
        self._warn_of_retry = warn_of_retry
        self._progress = progress

    async def retry(
        self, work: Callable[[], Awaitable[Result]], is_newer_waiting: Callable[[], bool] = _never
    ) -> Result:
        """Retries until it succeeds, the time is over, or something newer is waiting."""
        began, tries = self._runtime.clock(), 0
        while True:
            try:
                return await work()
            except (PermissionDenied, NotFound):
                raise
            except BucketError as problem:
                tries += 1
                if is_newer_waiting() or self._runtime.clock() - began > self._retry_seconds:
                    raise
                self._warn_of_retry(problem.message)
            await asyncio.sleep(backoff(self._runtime, tries))

    async def name(self, kind: str, version: int, epoch: int, made: Delta, rank: int = 0) -> DataFile:
        """The path of a delta or anchor. Call it once for all retries: it hashes the whole file."""
        sha256 = await self._runtime.run_in_thread(_hash, made, self._progress("hash", made.nbytes))
        head = FileHead(len(made.head), hashlib.sha256(made.head).hexdigest())
        return DataFile(data_path(kind, version, epoch, rank, sha256), made.nbytes, sha256, rank, head)

    async def put(self, file: DataFile, made: Delta) -> None:
        await self._bucket.put(file.path, made.chunks(_CHUNK), made.nbytes)


def _hash(made: Delta, progress: Callable[[int], None]) -> str:
    whole = hashlib.sha256()
    for chunk in made.chunks(_CHUNK):
        whole.update(chunk)
        progress(len(chunk))
    return whole.hexdigest()
