"""Exports a run as one HTML file."""

from __future__ import annotations

import msgspec

from weightwire.bucket import Bucket
from weightwire.errors import NoRun
from weightwire.page.document import exported
from weightwire.page.run_reader import RunReader
from weightwire.system import Runtime

__all__ = ["export_page"]


async def export_page(bucket: Bucket) -> bytes:
    """The current state of the run in a bucket, as one self-contained HTML file."""
    snapshot = await RunReader(bucket, Runtime()).look()
    if not snapshot.run:
        raise NoRun(
            f"{bucket.url}: nothing has been published there yet",
            hint="check the URL, or run `weightwire publish DIR URL`",
        )
    return exported(msgspec.json.encode(snapshot))
