"""The live page: a local server that polls the bucket and serves the newest snapshot.

    GET /               the document, and the files that it links to
    GET /run.json       the snapshot; 304 if the client already has it

Knows HTTP and a reader. It polls every second while a client watches. Without clients it polls rarely, but does not
stop: heartbeats hold only recent history. It never writes to the bucket. If the bucket fails, the page shows why.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
from dataclasses import dataclass, replace

import msgspec

from weightwire.bucket import Bucket, open_bucket
from weightwire.errors import WeightwireError
from weightwire.page.document import LIVE_POLICY, SCRIPTS, live, part, plotly, plotly_gzipped
from weightwire.page.run_reader import RunReader
from weightwire.page.run_view import RunView
from weightwire.system import Access, Closeable, HttpReply, HttpRequest, HttpServer, LoopThread, Runtime, format_address

__all__ = ["PORT", "PageServer"]

PORT = 8765
_TRIES = 20  # ports, from PORT on
_OFTEN, _SELDOM = 1.0, 15.0  # seconds between polls
_WATCHED = 10.0  # seconds after its last request that a client counts as watching
_TIMEOUT = 30.0  # seconds for a request, and for sending the reply
_HEADERS = {
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": LIVE_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Shown:
    """A snapshot in the form that is sent."""

    snapshot: RunView
    tag: str
    body: bytes
    gzipped: bytes

    @classmethod
    def of(cls, snapshot: RunView, before: Shown | None = None) -> Shown:
        """Returns `before` if nothing but the time has changed."""
        digest = hashlib.sha256(msgspec.json.encode(replace(snapshot, at=0.0))).hexdigest()
        tag = f'"{digest[:32]}"'
        if before is not None and before.tag == tag:
            return before
        body = msgspec.json.encode(snapshot)
        return cls(snapshot, tag, body, gzip.compress(body, 3))


class PageServer(Closeable):
    """Serves a run at `address` until `close`. Without a `port` it takes the first free one from PORT on.

    The bucket is read once at startup, and errors are raised. Later errors are shown on the page.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Bucket,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        access: Access | None = None,
    ) -> None:
        plotly()  # fail early if it is not installed
        self._bucket = open_bucket(url)
        self._server = HttpServer(
            host,
            range(PORT, PORT + _TRIES) if port is None else [port],
            self._answer,
            name="weightwire-page-http",
            methods=("GET", "HEAD"),
            timeout=_TIMEOUT,
            headers=_HEADERS,
            access=access or Access(),
            browser=True,
        )
        self._runtime = Runtime()
        self._reader = RunReader(self._bucket, self._runtime)
        self._asked = 0.0
        self._background = LoopThread("page")
        try:
            self.shown = Shown.of(self._background.call(self._reader.look()))
        except BaseException:
            self._server.close()
            self._background.stop()
            raise
        self.address = f"http://{format_address(host, self._server.port)}/"
        self._wake = asyncio.Event()
        self._looking = self._background.start(self._look_on())
        self._server.start()

    def ask(self) -> Shown:
        """The newest snapshot. Marks the page as watched."""
        watched, self._asked = self._is_watched(), self._runtime.clock()
        if not watched:
            self._background.call_soon(self._wake.set)
        return self.shown

    def _is_watched(self) -> bool:
        return bool(self._asked) and self._runtime.clock() - self._asked < _WATCHED

    async def _look_on(self) -> None:
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(_OFTEN if self._is_watched() else _SELDOM):
                    await self._wake.wait()
            except TimeoutError:
                pass
            try:
                snapshot = await self._reader.look()
            except WeightwireError as problem:
                snapshot = replace(self.shown.snapshot, trouble=problem.message)
            except Exception as problem:  # a bug must not look like a run without news
                snapshot = replace(self.shown.snapshot, trouble=f"{type(problem).__name__}: {problem}")
            self.shown = await self._runtime.run_in_thread(Shown.of, snapshot, self.shown)

    def close(self) -> None:
        if self._background.is_running:
            self._server.close()
            self._looking.cancel()
            self._background.call(self._bucket.close())
            self._background.stop()

    def _answer(self, request: HttpRequest) -> HttpReply:
        if request.path == "/run.json":
            shown = self.ask()
            found: _Content | None = _Content("application/json", shown.body, shown.gzipped, shown.tag)
        else:
            found = _part_at(request.path)
        if found is None:
            return HttpReply(404, "text/plain", b"not found: the page is at /\n")
        return found.reply_to(request)


@dataclass(frozen=True)
class _Content:
    """A response body: compressed if the client accepts it, omitted if the client already has it."""

    kind: str
    body: bytes
    gzipped: bytes | None = None
    tag: str = ""

    def reply_to(self, request: HttpRequest) -> HttpReply:
        headers = {"ETag": self.tag} if self.tag else {}
        if self.tag and request.headers.get("If-None-Match") == self.tag:
            return HttpReply(304, self.kind, b"", headers)
        if self.gzipped is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
            return HttpReply(200, self.kind, self.gzipped, {"Content-Encoding": "gzip", **headers})
        return HttpReply(200, self.kind, self.body, headers)


def _part_at(path: str) -> _Content | None:
    """The document, or a file that it links to."""
    name = path.removeprefix("/")
    if path == "/":
        return _Content("text/html; charset=utf-8", live())
    if path == "/plotly.js":
        gzipped = plotly_gzipped()
        tag = hashlib.sha256(gzipped).hexdigest()[:32]
        return _Content("text/javascript; charset=utf-8", plotly().encode(), gzipped, f'"{tag}"')
    if path == "/page.css":
        return _Content("text/css; charset=utf-8", part("page.css").encode())
    if name in SCRIPTS:
        return _Content("text/javascript; charset=utf-8", part(name).encode())
    return None
