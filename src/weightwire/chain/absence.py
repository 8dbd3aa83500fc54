"""When "access denied" means that an object is missing.

S3 answers 403 for an object that does not exist if the key lacks list permission. A run's run.json exists as long as
the run does, so a key that can read it was denied because the other object is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weightwire.bucket import Bucket
from weightwire.chain.records import RUN
from weightwire.errors import NotFound, PermissionDenied

__all__ = ["denied_means_missing"]


@asynccontextmanager
async def denied_means_missing(bucket: Bucket, path: str) -> AsyncIterator[None]:
    """Within it, a denied request for an object of a run raises NotFound if this key can read run.json."""
    try:
        yield
    except PermissionDenied as problem:
        await bucket.get(RUN)
        raise NotFound(f"{bucket.url}/{path}: is not there", hint="check the URL, or wait for it") from problem
