"""What absence means: when "access denied" means that an object is missing, and where a new run may start.

S3 answers 403 for an object that does not exist if the key lacks list permission, or has it for some prefixes only. A
run's run.json exists as long as the run does, so if the key can read run.json, a denied object is missing. A key that
may list a folder can tell for certain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weightwire.bucket import Bucket, ObjectInfo
from weightwire.chain.record_paths import HEAD, RUN, Folder
from weightwire.chain.records import DAMAGED, record_limit
from weightwire.errors import BrokenChain, BucketError, NotFound, PermissionDenied, TooLarge

__all__ = [
    "check_free",
    "denied_means_missing",
    "find_or_list",
    "get_record",
    "is_run_missing",
    "unlisted_means_missing",
]

_OR_FORBIDDEN = "if it exists, the key lacks permission to read it: see `weightwire policy ROLE URL`"
_RUN_ENTRIES = {HEAD, *(folder.removesuffix("/") for folder in Folder)}


async def get_record(bucket: Bucket, path: str) -> bytes:
    """The bytes of a record. Every record is read here, so that none is read past its limit."""
    try:
        return await bucket.get(path, record_limit(path))
    except TooLarge as problem:
        raise BrokenChain(problem.message, hint=DAMAGED) from problem


@asynccontextmanager
async def denied_means_missing(bucket: Bucket, path: str) -> AsyncIterator[None]:
    """Inside the block, a denied request raises NotFound if this key can read run.json."""
    try:
        yield
    except PermissionDenied as problem:
        await get_record(bucket, RUN)
        raise _missing(bucket, path) from problem


@asynccontextmanager
async def unlisted_means_missing(bucket: Bucket, path: str) -> AsyncIterator[None]:
    """Inside the block, a denied request raises NotFound if this key can list the folder and the object is not there.

    For decisions that must not take a forbidden object for a missing one, such as deleting.
    """
    try:
        yield
    except PermissionDenied as problem:
        try:
            listed = {one.path for one in await bucket.list(path[: path.rindex("/") + 1])}
        except PermissionDenied:
            raise problem from None
        if path in listed:
            raise
        raise _missing(bucket, path) from problem


def _missing(bucket: Bucket, path: str) -> NotFound:
    return NotFound(f"{bucket.url}/{path}: not found", hint=_OR_FORBIDDEN)


async def find_or_list(bucket: Bucket, path: str) -> ObjectInfo | None:
    """Looks up one object. None if it does not exist; if the store does not tell, by listing its folder."""
    try:
        async with unlisted_means_missing(bucket, path):
            return await bucket.find(path)
    except NotFound:
        return None


async def is_run_missing(bucket: Bucket) -> bool:
    """After a denied request for run.json: whether the run does not exist. False if this key cannot find out.

    Every run has an epoch, except for the moment in which its first publisher starts it.
    """
    try:
        return not await bucket.list(Folder.EPOCHS)
    except PermissionDenied:
        return False


async def check_free(bucket: Bucket) -> None:
    """Without a run, refuses a directory with other files: it was probably named by mistake, such as a checkpoint."""
    if "://" in bucket.url:  # only directories have a plain path
        return
    for one in await bucket.list(""):
        if one.path.split("/")[0] not in _RUN_ENTRIES:
            raise BucketError(f"{bucket.url}: contains files but no run", hint="name a new directory")
