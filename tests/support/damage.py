"""Damages the data of a run (flipped bits, truncated or deleted objects) and undoes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weightwire.bucket.bucket import Bucket

__all__ = ["HARMS", "cut", "flip", "paths", "put_back", "remove", "snapshot"]


def paths(bucket: Bucket, prefix: str = "") -> list[str]:
    return [one.path for one in asyncio.run(bucket.list("")) if one.path.startswith(prefix)]


def flip(bucket: Bucket, prefix: str) -> None:
    """Flips the last bit of each object."""
    _change(bucket, prefix, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def cut(bucket: Bucket, prefix: str) -> None:
    _change(bucket, prefix, lambda data: data[:-1])


def remove(bucket: Bucket, prefix: str) -> None:
    for path in paths(bucket, prefix):
        asyncio.run(bucket.delete(path))


HARMS = (flip, cut, remove)


def snapshot(bucket: Bucket) -> dict[str, bytes]:
    return {path: asyncio.run(bucket.get(path)) for path in paths(bucket)}


def put_back(bucket: Bucket, objects: dict[str, bytes]) -> None:
    for path, data in objects.items():
        asyncio.run(bucket.put(path, data))


def _change(bucket: Bucket, prefix: str, change: Callable[[bytes], bytes]) -> None:
    for path in paths(bucket, prefix):
        asyncio.run(bucket.put(path, change(asyncio.run(bucket.get(path)))))
