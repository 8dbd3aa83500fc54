"""A bucket that counts bytes for progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from weightwire.bucket import GET_LIMIT, Bucket, ForwardingBucket

__all__ = ["MeteredBucket"]


def _ignore(nbytes: int) -> None:
    pass


class MeteredBucket(ForwardingBucket):
    """Counts reads, and uploads of data, not of records and side files.

    `on_put` receives the size of an upload before it starts, again for each retry.
    """

    def __init__(
        self,
        inner: Bucket,
        *,
        on_put: Callable[[int], None] = _ignore,
        on_write: Callable[[int], None] = _ignore,
        on_read: Callable[[int], None] = _ignore,
    ) -> None:
        super().__init__(inner)
        self._on_put, self._on_write, self._on_read = on_put, on_write, on_read

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        if size is None or isinstance(data, bytes):
            await self._inner.put(path, data, size)
            return
        self._on_put(size)
        await self._inner.put(path, self._counted(data), size)

    def _counted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self._on_write(len(chunk))

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        data = await self._inner.get(path, limit)
        self._on_read(len(data))
        return data

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        await self._inner.read_into(path, buffer, start)
        self._on_read(buffer.nbytes)
