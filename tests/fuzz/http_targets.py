"""Targets for raw HTTP requests to the server of a follower and to the page, without a socket."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from fuzz.mutations import damage
from fuzz.target import ACCEPTED, Target, demand
from weightwire.follower.wakeups import WakeupServer
from weightwire.page.page_server import _HEADERS, PageServer
from weightwire.system.access import Access, Guard
from weightwire.system.http_server import HttpReply, HttpRequest, _Handler, _Service

WORDS = (
    "GET", "HEAD", "POST", "/status", "/metrics", "/readyz", "/healthz", "/run.json", "/page.css", "HTTP/1.1",
    "HTTP/1.0", "HTTP/0.9", "\r\n", "Host: ", "localhost", "127.0.0.1", "[::1]", "Content-Length: ", "If-None-Match: ",
    "Accept-Encoding: gzip", "Connection: keep-alive", "Expect: 100-continue", "\r\n\r\n", "?", "%00",
)  # fmt: skip


@dataclass
class Connection:
    """A socket that holds one request and keeps the reply."""

    request: bytes
    sent: bytearray = field(default_factory=bytearray)
    _taken: int = 0

    def makefile(self, mode: str, size: int) -> io.BytesIO:
        return io.BytesIO()

    def recv_into(self, buffer: memoryview) -> int:
        piece = self.request[self._taken : self._taken + len(buffer)]
        buffer[: len(piece)] = piece
        self._taken += len(piece)
        return len(piece)

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def settimeout(self, seconds: float) -> None: ...


def answer_wakeup(request: HttpRequest) -> HttpReply:
    told = SimpleNamespace(_wake=lambda body: None, _status=lambda: {"version": 1}, _metrics=lambda: b"metric 1\n")
    told._reasons = lambda: ["it holds no version yet"]
    return WakeupServer._answer(cast(WakeupServer, told), request)


def answer_page(request: HttpRequest) -> HttpReply:
    shown = SimpleNamespace(body=b"{}", gzipped=b"gz", tag='"tag"')
    return PageServer._answer(cast(PageServer, SimpleNamespace(ask=lambda: shown)), request)


def check_http(service: _Service, data: bytes) -> str:
    """Every request gets one well-formed reply, or none if it is not HTTP. The handler must not raise."""
    connection = Connection(data)
    _Handler(cast(Any, connection), ("127.0.0.1", 1), cast(Any, SimpleNamespace(service=service)))
    reply = bytes(connection.sent)
    if not reply:
        return "no reply"
    if not reply.startswith(b"HTTP/"):
        return "HTTP/0.9"  # whose replies have no head
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    demand(status.isdigit() and status != b"500", f"status {status!r}")
    demand(
        bool(body) or b"Content-Length: 0" in head or status not in (b"200", b"202") or data[:4] == b"HEAD",
        "empty reply",
    )
    return ACCEPTED if status in (b"200", b"202", b"304") else status.decode()


def http_seeds(paths: tuple[str, ...]) -> Iterator[bytes]:
    for path in paths:
        yield f"GET {path} HTTP/1.1\r\nHost: localhost:8765\r\nAccept-Encoding: gzip\r\n\r\n".encode()
    yield b'HEAD /run.json HTTP/1.1\r\nHost: [::1]\r\nIf-None-Match: "tag"\r\n\r\n'
    yield b"POST /wake?x=1 HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\nhello"
    yield b"GET /\r\n"


def mutate_http(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return damage(data, rng, data)
    at, word = rng.randrange(len(data) + 1), rng.choice(WORDS).encode()
    return data[:at] + word + data[at + rng.choice((0, 0, 1, len(word))) :]


GUARD = Guard(Access(), "127.0.0.1", "127.0.0.1")
FOLLOWER = _Service(answer_wakeup, ("GET", "POST"), {}, 5.0, GUARD)
PAGE = _Service(answer_page, ("GET", "HEAD"), _HEADERS, 30.0, GUARD)

TARGETS = [
    Target("http-follower", partial(check_http, FOLLOWER), mutate_http,
           partial(http_seeds, ("/", "/status", "/metrics", "/readyz", "/healthz")), WORDS, 1024),
    Target("http-page", partial(check_http, PAGE), mutate_http,
           partial(http_seeds, ("/", "/run.json", "/page.css", "/other")), WORDS, 1024),
]  # fmt: skip
