"""The status page: a run as pictures in a browser, live or as one file, from nothing but its bucket.

`reading` reads the bucket and remembers, `picture` is what there is to show as plain data (`layers`: which tensors make
up a row), `document` the HTML around it, `serving` the server. The pictures are drawn in the browser: `charts.js` makes
them of the data, `format.js` makes numbers and names readable and harmless, `page.js` is the rest of the page.
"""

from __future__ import annotations

import msgspec

from weightwire.bucket import Bucket
from weightwire.errors import NoRun
from weightwire.page.document import exported
from weightwire.page.reading import Reader
from weightwire.page.serving import PORT, Page
from weightwire.world import World

__all__ = ["PORT", "Page", "export"]


async def export(bucket: Bucket) -> bytes:
    """The run in a bucket as it is now, as one HTML file that needs nothing else."""
    picture = await Reader(bucket, World()).look()
    if not picture.run:
        raise NoRun(f"{bucket.url}: nothing has been published there yet", hint="check the URL, or start a publisher")
    return exported(msgspec.json.encode(picture))
