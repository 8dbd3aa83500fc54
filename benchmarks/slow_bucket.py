"""A bucket behind a slow link: limits bytes per second in both directions, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from weightwire.bucket import GET_LIMIT, Bucket, ForwardingBucket


class SlowBucket(ForwardingBucket):
    """A `Bucket` that transfers at most `bytes_per_second`."""

    def __init__(self, inner: Bucket, bytes_per_second: float) -> None:
        super().__init__(inner)
        self._rate = bytes_per_second

    async def create(self, path: str, data: bytes) -> None:
        await self._carry(len(data))
        await self._inner.create(path, data)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        whole = [data] if isinstance(data, bytes) else data
        await self._inner.put(path, self._paced(whole), size)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        data = await self._inner.get(path, limit)
        await self._carry(len(data))
        return data

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        await self._inner.read_into(path, buffer, start)
        await self._carry(buffer.nbytes)

    async def _carry(self, count: int) -> None:
        await asyncio.sleep(count / self._rate)

    def _paced(self, data: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Sleeping is fine here: buckets consume this iterator on a thread."""
        for piece in data:
            time.sleep(memoryview(piece).nbytes / self._rate)
            yield piece
