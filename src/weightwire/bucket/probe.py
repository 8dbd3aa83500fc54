"""Probes whether a bucket's `create` is atomic: of several concurrent creates, exactly one succeeds.

Some stores accept the request and silently ignore its condition. The probe objects are deleted afterwards.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import NoReturn

from weightwire.bucket.bucket import Bucket
from weightwire.errors import AlreadyExists, BucketError, NotFound, UnsafeBucket

__all__ = ["PROBE_FOLDER", "is_probe", "probe_bucket"]

PROBE_FOLDER = "probe/"
_PROBE = re.compile(r"probe/[0-9a-f]{32}(-[12])?")
_RACERS = 8


def is_probe(path: str) -> bool:
    """Whether an object has the name of a probe. Other objects under `probe/` are never deleted."""
    return _PROBE.fullmatch(path) is not None


async def probe_bucket(bucket: Bucket, token: str) -> None:
    """Raises `UnsafeBucket` if an object can be created twice. `token` is a unique name."""
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
    # The first result does not matter: a client that lost the reply and retried finds its own object.
    await _create(bucket, path, b"first")
    if await _create(bucket, path, b"second"):
        _refuse(bucket, "an existing object was created again")
    if await _get(bucket, path) != b"first":
        _refuse(bucket, "a rejected create replaced the object")


async def _at_once(bucket: Bucket, path: str) -> None:
    contents = [b"racer %d" % racer for racer in range(_RACERS)]
    results = await asyncio.gather(*(_create(bucket, path, content) for content in contents), return_exceptions=True)
    winners = [content for content, result in zip(contents, results, strict=True) if result is True]
    if len(winners) > 1:
        _refuse(bucket, f"{len(winners)} of {_RACERS} concurrent creates of one object succeeded")
    for problem in results:
        if isinstance(problem, BaseException):
            raise problem
    content = await _get(bucket, path)
    if content not in (winners or contents):
        _refuse(bucket, "the object does not hold what its creator wrote")
    if await _create(bucket, path, b"late") or await _get(bucket, path) != content:
        _refuse(bucket, "the object changed after it was created")


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
        _refuse(bucket, "a created object was not found")


def _refuse(bucket: Bucket, what: str) -> NoReturn:
    raise UnsafeBucket(
        f"{bucket.url}: {what}, so two trainers could both publish here",
        hint="use a store that honours If-None-Match on PUT (S3, GCS, Azure, MinIO, SeaweedFS, R2) or a directory; or "
        "pass `--insist` (insist=True) and make sure that only one publisher runs",
    )
