"""How a publisher brings data into the bucket: with patience, and under names that say what it is.

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
from weightwire.errors import BucketError, NotFound, PermissionDenied, WeightwireError
from weightwire.system import Runtime

__all__ = ["Dropped", "Uploader"]

Result = TypeVar("Result")

_CHUNK = 2 << 20


class Dropped(Exception):
    """Something that failed, and was given up before any commit was sent."""

    def __init__(self, problem: WeightwireError) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Uploader:
    """`patience` is how many seconds a failure is borne with; `newer` that there is something better to do."""

    def __init__(
        self, bucket: Bucket, runtime: Runtime, patience: float, newer: Callable[[], bool], warn: Warn
    ) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._patience = patience
        self._newer = newer
        self._warn = warn

    async def patiently(self, work: Callable[[], Awaitable[Result]], *, to_the_end: bool = False) -> Result:
        """Again and again, until it works or patience ends; or, if not `to_the_end`, something newer is waiting."""
        began, tries = self._runtime.clock(), 0
        while True:
            try:
                return await work()
            except (PermissionDenied, NotFound) as problem:
                raise Dropped(problem) from problem
            except BucketError as problem:
                tries += 1
                newer = not to_the_end and self._newer()
                if newer or self._runtime.clock() - began > self._patience:
                    raise Dropped(problem) from problem
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
