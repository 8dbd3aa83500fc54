"""The live page: a server on this machine that looks at the bucket, and whoever opens it sees what it saw last.

    GET /               the document, and the files that it names
    GET /run.json       the picture; 304 where the one who asks has it already

Knows HTTP, and a reader to ask. Looks often while someone watches, and seldom otherwise, so that nothing is missed of
what replicas tell only for a while. Writes nothing to the bucket; one that cannot be reached is told of on the page.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import os
import socket
import socketserver
import threading
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from weightwire.bucket import Bucket, open_bucket
from weightwire.errors import WeightwireError
from weightwire.page.document import LIVE_POLICY, SCRIPTS, live, part, plotly, plotly_gzipped
from weightwire.page.run_reader import RunReader
from weightwire.page.run_view import RunView
from weightwire.system import Closeable, LoopThread, Runtime, cannot_listen, name_in

__all__ = ["PORT", "PageServer"]

PORT = 8765
_TRIES = 20  # ports after the usual one
_OFTEN, _SELDOM = 1.0, 15.0  # seconds between two looks
_WATCHED = 10.0  # seconds that one who has asked counts as watching
_PATIENCE = 30.0  # seconds, with one who says nothing
_LOCAL = ("127.0.0.1", "localhost", "::1")


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

    def __init__(self, url: str | os.PathLike[str] | Bucket, *, host: str = _LOCAL[0], port: int | None = None) -> None:
        plotly()  # without which there is nothing to show
        self._bucket = open_bucket(url) if isinstance(url, str | os.PathLike) else url
        self._server = _listen(host, port)
        self._server.page = self
        self._runtime = Runtime()
        self._reader = RunReader(self._bucket, self._runtime)
        self._asked = 0.0
        self._background = LoopThread("weightwire-page")
        try:
            self.shown = Shown.of(self._background.call(self._reader.look()))
        except BaseException:
            self._server.server_close()
            self._background.stop()
            raise
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self._server.server_port}/"
        self._wake = asyncio.Event()
        self._looking = self._background.start(self._look_on())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="weightwire-page-http", daemon=True
        )
        self._thread.start()

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
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._looking.cancel()
            self._background.call(self._bucket.close())
            self._background.stop()


# --- HTTP --------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    page: PageServer

    def __init__(self, family: int, place: tuple[str, int]) -> None:
        self.address_family = family
        # A server for this machine answers to this machine's own names only: a site whose name was made to lead here
        # could have its scripts read the page.
        self.names = _LOCAL if place[0] in _LOCAL else None
        super().__init__(place, _Visit)

    def server_bind(self) -> None:
        # Without asking the network for the full name of this machine, which nobody needs and may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One who left, or sent what is no HTTP. No reason for a traceback."""


@dataclass(frozen=True)
class _Answer:
    kind: str
    body: bytes
    gzipped: bytes | None = None
    tag: str = ""


class _Visit(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "weightwire", ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        names = self.server.names
        if names is not None and name_in(self.headers.get("Host", "")) not in names:
            self._send(403, _Answer("text/plain", b"this page is for this machine only\n"))
            return
        answer = self._answer(self.path.partition("?")[0])
        if answer is None:
            self._send(404, _Answer("text/plain", b"there is only the page, at /\n"))
        elif answer.tag and self.headers.get("If-None-Match") == answer.tag:
            self._send(304, answer)
        else:
            self._send(200, answer)

    do_HEAD = do_GET

    def _answer(self, path: str) -> _Answer | None:
        if path == "/":
            return _Answer("text/html; charset=utf-8", live())
        if path == "/run.json":
            shown = self.server.page.ask()
            return _Answer("application/json", shown.body, shown.gzipped, shown.tag)
        if path == "/plotly.js":
            gzipped = plotly_gzipped()
            tag = hashlib.sha256(gzipped).hexdigest()[:32]
            return _Answer("text/javascript; charset=utf-8", plotly().encode(), gzipped, f'"{tag}"')
        if path == "/page.css":
            return _Answer("text/css; charset=utf-8", part("page.css").encode())
        if path.removeprefix("/") in SCRIPTS:
            return _Answer("text/javascript; charset=utf-8", part(path.removeprefix("/")).encode())
        return None

    def _send(self, code: int, answer: _Answer) -> None:
        gzipped = answer.gzipped is not None and "gzip" in self.headers.get("Accept-Encoding", "")
        body = answer.gzipped if gzipped and answer.gzipped is not None else answer.body
        self.send_response(code)
        if code != 304:
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(body)))
            if gzipped:
                self.send_header("Content-Encoding", "gzip")
        if answer.tag:
            self.send_header("ETag", answer.tag)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if code != 304 and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page that is open asks every second."""


_HEADERS = {
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": LIVE_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _listen(host: str, port: int | None) -> _Server:
    """At a port that was asked for, or at the usual one or the first free one after it."""
    ports = range(PORT, PORT + _TRIES) if port is None else range(port, port + 1)
    for one in ports:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0]
            return _Server(family, (str(place[0]), int(place[1])))
        except (OSError, UnicodeError, OverflowError) as problem:
            if getattr(problem, "errno", None) != errno.EADDRINUSE or one == ports[-1]:
                raise cannot_listen(host, one, problem) from problem
    raise AssertionError("there is always a port to try")
