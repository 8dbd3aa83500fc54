"""Finds out whether a bucket keeps its word: that of several who create an object, at the same time too, one succeeds.

Some stores take the request and ignore its condition, without a word. Knows only the verbs of a bucket; leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NoReturn

from weightwire.bucket.bucket import Bucket
from weightwire.errors import AlreadyExists, BucketError, NotFound, UnsafeBucket

__all__ = ["PROBE_FOLDER", "probe_bucket"]

PROBE_FOLDER = "probe/"
_RACERS = 8


async def probe_bucket(bucket: Bucket, token: str) -> None:
    """Raises `UnsafeBucket` if an object can be created twice. `token` is a name that nobody else has."""
    if not bucket.strict:
        return
    paths = [f"{PROBE_FOLDER}{token}-1", f"{PROBE_FOLDER}{token}-2"]
    try:
        await _twice(bucket, paths[0])
        await _at_once(bucket, paths[1])
    finally:
        for path in paths:
            with suppress(BucketError):
                await bucket.delete(path)


async def _twice(bucket: Bucket, path: str) -> None:
    # Whether the first is reported as done is not asked: a client that lost the reply and tried again finds its own.
    await _create(bucket, path, b"first")
    if await _create(bucket, path, b"second"):
        _refuse(bucket, "an object that was there was created again")
    if await _get(bucket, path) != b"first":
        _refuse(bucket, "a create that was refused has replaced an object")


async def _at_once(bucket: Bucket, path: str) -> None:
    contents = [b"racer %d" % racer for racer in range(_RACERS)]
    results = await asyncio.gather(*(_create(bucket, path, content) for content in contents), return_exceptions=True)
    winners = [content for content, result in zip(contents, results, strict=True) if result is True]
    if len(winners) > 1:
        _refuse(bucket, f"{len(winners)} of {_RACERS} who created an object at the same time were told that they did")
    for problem in results:
        if isinstance(problem, BaseException):
            raise problem
    content = await _get(bucket, path)
    if content not in (winners or contents):
        _refuse(bucket, "an object does not hold what its creator wrote")
    if await _create(bucket, path, b"late") or await _get(bucket, path) != content:
        _refuse(bucket, "an object has changed after it was created")


async def _create(bucket: Bucket, path: str, content: bytes) -> bool:
    try:
        await bucket.create(path, content)
    except AlreadyExists:
        return False
    return True


async def _get(bucket: Bucket, path: str) -> bytes:
    try:
        return await bucket.get(path)
    except NotFound:
        _refuse(bucket, "an object that was created is not there")


def _refuse(bucket: Bucket, what: str) -> NoReturn:
    raise UnsafeBucket(
        f"{bucket.url}: {what}, so two trainers could both publish here",
        hint="use a store that honours If-None-Match on PUT (S3, GCS, Azure, MinIO, SeaweedFS, R2) or a directory",
    )
