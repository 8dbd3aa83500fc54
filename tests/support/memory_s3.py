"""An S3 server in this process: just enough of S3 for one client, with the faults of `faults.proxy`.

It checks no signatures. For attacks that no real server can be made to do.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from faults.proxy import Proxy, Reply, Request
from support.stores import environment

__all__ = ["MemoryS3", "listing"]

_MODIFIED = "Tue, 01 Jan 2030 00:00:00 GMT"
_MISSING = Reply(404, [], b"<Error><Code>NoSuchKey</Code></Error>")
_TAKEN = Reply(412, [], b"<Error><Code>PreconditionFailed</Code></Error>")


@dataclass
class MemoryS3(Proxy):
    """`with MemoryS3() as store:`. `store.objects` are those of the run at `store.url`, by path."""

    target: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    page: int = 1000
    """Entries in one page of a listing."""

    bucket = "weights"
    prefix = "run/"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._writing = threading.Lock()

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix.rstrip('/')}"

    @property
    def env(self) -> dict[str, str]:
        return environment(self.endpoint, "key", "secret")

    def _send(self, request: Request) -> Reply:
        where = urlsplit(request.path)
        key = unquote(where.path).removeprefix(f"/{self.bucket}").removeprefix("/")
        headers = {name.lower(): value for name, value in request.headers}
        if key:
            reply = self._object(request, key.removeprefix(self.prefix), headers)
        else:
            reply = self._list({name: values[0] for name, values in parse_qs(where.query).items()})
        self.requests.append((request.method, request.path, reply.status))
        return reply

    def _object(self, request: Request, path: str, headers: dict[str, str]) -> Reply:
        with self._writing:
            if request.method == "PUT":
                if "if-none-match" in headers and path in self.objects:
                    return _TAKEN
                self.objects[path] = request.body
                return Reply(200, [("ETag", '"new"')], b"")
            if request.method == "DELETE":
                self.objects.pop(path, None)
                return Reply(204, [], b"")
        data = self.objects.get(path)
        if data is None:
            return _MISSING
        about = [("ETag", f'"{hashlib.sha256(data).hexdigest()[:32]}"'), ("Last-Modified", _MODIFIED)]
        if request.method == "HEAD":
            return Reply(200, [*about, ("Content-Length", str(len(data)))], b"")
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", "")):
            begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
            if begin >= end:
                return Reply(416, [], b"<Error><Code>InvalidRange</Code></Error>")
            return Reply(206, [*about, ("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")], data[begin:end])
        return Reply(200, about, data)

    def _list(self, query: dict[str, str]) -> Reply:
        after = query.get("continuation-token", "")
        keys = sorted(self.prefix + path for path in self.objects)
        wanted = [key for key in keys if key.startswith(query.get("prefix", "")) and key > after]
        page = wanted[: self.page]
        entries = [(key, len(self.objects[key.removeprefix(self.prefix)])) for key in page]
        return listing(entries, page[-1] if len(wanted) > len(page) else "")


def listing(entries: Sequence[tuple[str, int]], more: str = "") -> Reply:
    """A page of keys and sizes. `more` is the token of the next page."""
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2030-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"x"</ETag><Size>{size}</Size></Contents>'
        for key, size in entries
    )
    rest = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    body = f"<ListBucketResult>{contents}<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{rest}</ListBucketResult>"
    return Reply(200, [("Content-Type", "application/xml")], body.encode())
