"""A bucket that passes everything on, for wrappers that change only some requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightwire.bucket.bucket import GET_LIMIT, Bucket, ObjectInfo

__all__ = ["ForwardingBucket"]


class ForwardingBucket:
    """Passes every request on to `inner`. Subclasses override the requests that they change."""

    def __init__(self, inner: Bucket) -> None:
        self.url, self.strict, self.poll_interval = inner.url, inner.strict, inner.poll_interval
        self._inner = inner

    async def create(self, path: str, data: bytes) -> None:
        await self._inner.create(path, data)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        await self._inner.put(path, data, size)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        return await self._inner.get(path, limit)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        await self._inner.read_into(path, buffer, start)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._inner.list(prefix)

    async def find(self, path: str) -> ObjectInfo | None:
        return await self._inner.find(path)

    async def delete(self, path: str) -> None:
        await self._inner.delete(path)

    async def close(self) -> None:
        await self._inner.close()
