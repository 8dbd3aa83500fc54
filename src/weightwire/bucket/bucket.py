"""The bucket interface: eight operations that every backend implements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["GET_LIMIT", "Bucket", "ObjectInfo"]

GET_LIMIT = 64 << 20
"""The most bytes that `Bucket.get` reads by default."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing. `modified` is in seconds since 1970, by the store's clock."""

    path: str
    size: int
    modified: float


class Bucket(Protocol):
    """Objects under one URL prefix. Paths are relative to it: plain names joined by `/`.

    Every operation may raise a `BucketError`: `NotFound`, `AlreadyExists`, `PermissionDenied`, or `Unavailable` if a
    later attempt may succeed. A write that raised `Unavailable` may have happened.
    """

    url: str
    """Names the bucket and the prefix for people. A directory has a plain path. Never contains a secret."""

    strict: bool
    """Whether `create` is atomic. If not, only one publisher may write (single-writer mode)."""

    poll_interval: float
    """The shortest time between two polls, in seconds. Longer where the store limits the request rate."""

    async def create(self, path: str, data: bytes) -> None:
        """Creates an object that must not exist yet. If several callers race, exactly one succeeds."""

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        """Creates or replaces an object atomically. `size` is the total of an iterable, if known."""

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        """Reads a small object. Raises `TooLarge` if it has more than `limit` bytes, without holding more of them."""

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        """Fills a buffer with the bytes of an object from `start` on. Reads large ranges in parallel."""

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Lists all objects under `prefix` at any depth, sorted by path. `prefix` ends in `/`, or is "" for all."""

    async def find(self, path: str) -> ObjectInfo | None:
        """Looks up one object. None if it does not exist."""

    async def delete(self, path: str) -> None:
        """Deletes an object if it exists."""

    async def close(self) -> None:
        """Closes connections."""
