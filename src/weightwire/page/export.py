"""A run as one HTML file, as it is now."""

from __future__ import annotations

import msgspec

from weightwire.bucket import Bucket
from weightwire.errors import NoRun
from weightwire.page.document import exported
from weightwire.page.run_reader import RunReader
from weightwire.system import Runtime

__all__ = ["export_page"]


async def export_page(bucket: Bucket) -> bytes:
    """The run in a bucket as it is now, as one HTML file that needs nothing else."""
    picture = await RunReader(bucket, Runtime()).look()
    if not picture.run:
        raise NoRun(f"{bucket.url}: nothing has been published there yet", hint="check the URL, or start a publisher")
    return exported(msgspec.json.encode(picture))
