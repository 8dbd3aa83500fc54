"""What the rest of weightwire asks of a bucket: eight verbs. Every backend offers exactly these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Bucket", "ObjectInfo"]


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says of an object. `modified` is by the store's own clock, in seconds since 1970."""

    path: str
    size: int
    modified: float


class Bucket(Protocol):
    """Bytes by path, under one URL prefix. Paths are relative to it, with `/` between plain names.

    All verbs raise a `BucketError`: `NotFound`, `AlreadyExists`, `PermissionDenied`, or `Unavailable` for whatever may
    pass. After a write that failed with `Unavailable` nobody knows whether it happened.
    """

    url: str
    """For people: it names the bucket and the prefix, and never holds a secret."""

    strict: bool
    """Whether `create` is atomic. Where it is not, only one publisher may ever write: the single-writer mode."""

    poll_interval: float
    """The shortest time, in seconds, between two looks for something new: longer where requests are rationed."""

    async def create(self, path: str, data: bytes) -> None:
        """Makes an object that must not be there yet; of several at the same time exactly one succeeds."""

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        """Makes or replaces an object, all at once; in parts where it is large. `size` of an iterable, if known."""

    async def get(self, path: str) -> bytes:
        """All of a small object."""

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        """Fills a buffer with the bytes of an object from `start` on, in parallel where it is large."""

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """All objects under `prefix`, a path that ends in `/` (or "" for all), at any depth, sorted by path."""

    async def find(self, path: str) -> ObjectInfo | None:
        """What a listing would say of one object; None if it is not there."""

    async def delete(self, path: str) -> None:
        """Removes an object, if it is there."""

    async def close(self) -> None:
        """Lets go of connections."""
