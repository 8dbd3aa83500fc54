"""A bucket at the end of a slow line: every byte takes its time, in either direction. Counts nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from weightwire.bucket.bucket import Bucket, ObjectInfo


class SlowBucket:
    """A `Bucket` that carries at most so many bytes per second."""

    def __init__(self, inner: Bucket, bytes_per_second: float) -> None:
        self.url, self.strict = inner.url, inner.strict
        self._inner = inner
        self._rate = bytes_per_second

    async def create(self, path: str, data: bytes) -> None:
        await self._carry(len(data))
        await self._inner.create(path, data)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        whole = [data] if isinstance(data, bytes) else data
        await self._inner.put(path, self._paced(whole), size)

    async def get(self, path: str) -> bytes:
        data = await self._inner.get(path)
        await self._carry(len(data))
        return data

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        await self._inner.read_into(path, buffer, start)
        await self._carry(buffer.nbytes)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._inner.list(prefix)

    async def find(self, path: str) -> ObjectInfo | None:
        return await self._inner.find(path)

    async def delete(self, path: str) -> None:
        await self._inner.delete(path)

    async def close(self) -> None:
        await self._inner.close()

    async def _carry(self, count: int) -> None:
        await asyncio.sleep(count / self._rate)

    def _paced(self, data: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Buckets read what they are to put in a thread, which may sleep."""
        for piece in data:
            time.sleep(memoryview(piece).nbytes / self._rate)
            yield piece
