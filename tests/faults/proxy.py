"""A proxy to an S3 server with faults on demand: lost replies, lost requests and late requests.

It works on HTTP, so a test can choose requests. It forwards the client's `Host`, which the signature covers.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

__all__ = [
    "METHODS",
    "Proxy",
    "Reply",
    "Request",
    "Trouble",
    "deny_missing",
    "late",
    "lose_reply",
    "lose_request",
    "mark_parts",
    "slow",
    "truncate",
]

METHODS = ("GET", "PUT", "POST", "HEAD", "DELETE")
_HOPS = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    missing: int = 0
    """Announced bytes of the body that are never sent; if negative, bytes that are sent but not announced."""
    pause: float = 0.0
    """Seconds between two bytes of the body."""


Send = Callable[[], Reply]
Trouble = Callable[[Send], Reply | None]
"""Handles a request, and may send it. None closes the connection without a reply."""


# --- faults ----------------------------------------------------------------------------------------------------------


def lose_reply(send: Send) -> Reply | None:
    """The server executes the request, but the reply is lost."""
    send()
    return None


def lose_request(send: Send) -> Reply | None:
    return None


def truncate(send: Send) -> Reply | None:
    """The connection closes in the middle of the body."""
    reply = send()
    kept = reply.body[: len(reply.body) // 2]
    return replace(reply, body=kept, missing=len(reply.body) - len(kept))


def late(seconds: float) -> Trouble:
    """The connection closes, but the request arrives later, after the client has given up."""

    def trouble(send: Send) -> Reply | None:
        def arrive() -> None:
            time.sleep(seconds)
            with suppress(OSError, http.client.HTTPException):
                send()

        threading.Thread(target=arrive, daemon=True).start()
        return None

    return trouble


def slow(seconds: float) -> Trouble:
    def trouble(send: Send) -> Reply | None:
        time.sleep(seconds)
        return send()

    return trouble


def deny_missing(send: Send) -> Reply | None:
    """S3's answer for a missing object to a key without list permission. SeaweedFS always answers 404."""
    reply = send()
    return Reply(403, [("Content-Type", "application/xml")], _DENIED) if reply.status == 404 else reply


def mark_parts(send: Send) -> Reply | None:
    """rclone answers a range request with status 200 and a Content-Range header. Makes it a 206."""
    reply = send()
    is_part = reply.status == 200 and any(name.lower() == "content-range" for name, _ in reply.headers)
    return Reply(206, reply.headers, reply.body) if is_part else reply


# --- the proxy -------------------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    method: str
    path: re.Pattern[str]
    trouble: Trouble
    times: float


@dataclass
class Proxy:
    """`with Proxy(endpoint) as proxy:`. Clients connect to `proxy.endpoint`."""

    target: str
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path and reply status of every request that reached the server."""
    remembers: bool = True
    """Whether it records requests. A proxy that runs for hours should not."""
    nbytes: int = 0
    """Bytes in the bodies of all requests and replies."""

    def __post_init__(self) -> None:
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()
        this = self

        class Handler(_Handler):
            proxy = this

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def trouble(self, method: str, path: str, trouble: Trouble, times: float = 1) -> None:
        """Applies a fault to the next requests with this method and a matching path."""
        with self._lock:
            self._plans.append(_Plan(method, re.compile(path), trouble, times))

    def calm(self) -> None:
        with self._lock:
            self._plans.clear()

    def count(self, method: str, path: str, status: int | None = None) -> int:
        """The number of requests that reached the server."""
        found = [answer for how, where, answer in self.requests if how == method and re.search(path, where)]
        return len(found) if status is None else found.count(status)

    def pass_on(self, request: Request) -> Reply | None:
        trouble = self._next_trouble(request)
        return self._send(request) if trouble is None else trouble(lambda: self._send(request))

    def _next_trouble(self, request: Request) -> Trouble | None:
        with self._lock:
            for plan in self._plans:
                if plan.times > 0 and plan.method == request.method and plan.path.search(request.path):
                    plan.times -= 1
                    return plan.trouble
        return None

    def _send(self, request: Request) -> Reply:
        where = urlsplit(self.target)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers:
                connection.putheader(name, value)
            connection.endheaders(request.body)
            answer = connection.getresponse()
            reply = Reply(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()
        if self.remembers:
            self.requests.append((request.method, request.path, reply.status))
        self.nbytes += len(request.body) + len(reply.body)  # inexact if threads race, which is good enough for a table
        return reply


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed: its traceback would only be noise
            super().handle()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, list(self.headers.items()), body)
        try:
            reply = self.proxy.pass_on(request)
        except (OSError, http.client.HTTPException):
            reply = None  # the server is gone: close the connection as well
        if reply is None:
            self._hang_up()
            return
        with suppress(OSError):  # the client is gone
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        length = len(reply.body) + reply.missing
        for name, value in reply.headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = int(value)
            elif name.lower() not in _HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            for piece in [reply.body[i : i + 1] for i in range(len(reply.body))] if reply.pause else [reply.body]:
                time.sleep(reply.pause)
                self.wfile.write(piece)
        if reply.missing:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client closed it first
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        pass
