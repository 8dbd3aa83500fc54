"""How a publisher brings data into the bucket: trying again where it fails, and under names that say what it is.

Knows deltas as bytes; no records but those that name a file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from weightwire.bucket import Bucket
from weightwire.chain import DataFile, Warn, backoff, data_path
from weightwire.delta import Delta
from weightwire.errors import BucketError, NotFound, PermissionDenied
from weightwire.system import Runtime

__all__ = ["Uploader"]

Result = TypeVar("Result")

_CHUNK = 2 << 20


def _never() -> bool:
    return False


class Uploader:
    """What fails is tried again for `retry_seconds`."""

    def __init__(self, bucket: Bucket, runtime: Runtime, retry_seconds: float, warn: Warn) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._retry_seconds = retry_seconds
        self._warn = warn

    async def retry(
        self, work: Callable[[], Awaitable[Result]], is_newer_waiting: Callable[[], bool] = _never
    ) -> Result:
        """Tries again until it works, until the time for that is over, or until something newer is waiting."""
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
                self._warn(f"{problem.message}; trying again")
            await asyncio.sleep(backoff(self._runtime, tries))

    async def name(self, kind: str, version: int, epoch: int, made: Delta, rank: int = 0) -> DataFile:
        """Where a delta or anchor goes. Once for all tries: all of it is hashed for that."""
        sha256 = await self._runtime.run_in_thread(_hash, made)
        return DataFile(data_path(kind, version, epoch, rank, sha256), made.nbytes, sha256, rank)

    async def put(self, file: DataFile, made: Delta) -> None:
        await self._bucket.put(file.path, made.chunks(_CHUNK), made.nbytes)


def _hash(made: Delta) -> str:
    whole = hashlib.sha256()
    for chunk in made.chunks(_CHUNK):
        whole.update(chunk)
    return whole.hexdigest()
