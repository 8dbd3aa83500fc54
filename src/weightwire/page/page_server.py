"""The live page: a server on this machine that looks at the bucket, and whoever opens it sees what it saw last.

    GET /               the document, and the files that it names
    GET /run.json       the picture; 304 where the one who asks has it already

Knows HTTP, and a reader to ask. Looks often while someone watches, and seldom otherwise, so that nothing is missed of
what replicas tell only for a while. Writes nothing to the bucket; one that cannot be reached is told of on the page.
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
from weightwire.system import Closeable, HttpReply, HttpRequest, HttpServer, LoopThread, Runtime, format_address

__all__ = ["PORT", "PageServer"]

PORT = 8765
_TRIES = 20  # ports after the usual one
_OFTEN, _SELDOM = 1.0, 15.0  # seconds between two looks
_WATCHED = 10.0  # seconds that one who has asked counts as watching
_TIMEOUT = 30.0  # seconds, for a client that sends nothing
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
    """A picture as it is sent."""

    picture: RunView
    tag: str
    body: bytes
    gzipped: bytes

    @classmethod
    def of(cls, picture: RunView, before: Shown | None = None) -> Shown:
        """The one before, where nothing is new but the time of the look."""
        digest = hashlib.sha256(msgspec.json.encode(replace(picture, at=0.0))).hexdigest()
        tag = f'"{digest[:32]}"'
        if before is not None and before.tag == tag:
            return before
        body = msgspec.json.encode(picture)
        return cls(picture, tag, body, gzip.compress(body, 3))


class PageServer(Closeable):
    """Serves a run from the start until `close`. `address` is where; without a port it takes one that is free.

    The first look is made at once: what is wrong with the bucket is raised then, and only told of on the page later.
    """

    def __init__(
        self, url: str | os.PathLike[str] | Bucket, *, host: str = "127.0.0.1", port: int | None = None
    ) -> None:
        plotly()  # without which there is nothing to show
        self._bucket = open_bucket(url)
        self._server = HttpServer(
            host,
            range(PORT, PORT + _TRIES) if port is None else [port],
            self._answer,
            name="weightwire-page-http",
            methods=("GET", "HEAD"),
            timeout=_TIMEOUT,
            headers=_HEADERS,
            check_host=True,
        )
        self._runtime = Runtime()
        self._reader = RunReader(self._bucket, self._runtime)
        self._asked = 0.0
        self._background = LoopThread("weightwire-page")
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
        """What was seen last; and from now on someone watches."""
        watched, self._asked = self._is_watched(), self._runtime.clock()
        if not watched:
            self._background.tell(self._wake.set)
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
                picture = await self._reader.look()
            except WeightwireError as problem:
                picture = replace(self.shown.picture, trouble=problem.message)
            except Exception as problem:  # a fault of ours must not look like a run without news
                picture = replace(self.shown.picture, trouble=f"{type(problem).__name__}: {problem}")
            self.shown = await self._runtime.run_in_thread(Shown.of, picture, self.shown)

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
            return HttpReply(404, "text/plain", b"there is only the page, at /\n")
        return found.reply_to(request)


@dataclass(frozen=True)
class _Content:
    """Something to send: compressed to clients that accept it, and not at all to those that have it already."""

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
    """The document, or one of the files that it names."""
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
