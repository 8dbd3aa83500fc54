"""A road to an S3 server on which what is told goes wrong: replies get lost, requests do not arrive, or arrive late.

Speaks HTTP, so that a test can say which requests it means. Passes the client's `Host` on, as the signature covers it.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

__all__ = [
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
]

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


Send = Callable[[], Reply]
Trouble = Callable[[Send], Reply | None]
"""What happens to a request: it may be sent, and None means that the client hears nothing but a line going dead."""


# --- what can happen -------------------------------------------------------------------------------------------------


def lose_reply(send: Send) -> Reply | None:
    """The server has done it, and says so to nobody."""
    send()
    return None


def lose_request(send: Send) -> Reply | None:
    return None


def late(seconds: float) -> Trouble:
    """The line goes dead, and yet the request arrives: when everybody has given it up."""

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
    """What S3 says to a key that may not list of an object that is not there. SeaweedFS tells everybody."""
    reply = send()
    return Reply(403, [("Content-Type", "application/xml")], _DENIED) if reply.status == 404 else reply


def mark_parts(send: Send) -> Reply | None:
    """rclone answers for a part of an object as if it were all of it, though it says in a header which part it is."""
    reply = send()
    is_part = reply.status == 200 and any(name.lower() == "content-range" for name, _ in reply.headers)
    return Reply(206, reply.headers, reply.body) if is_part else reply


# --- to what ---------------------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    method: str
    path: re.Pattern[str]
    trouble: Trouble
    times: float


@dataclass
class Proxy:
    """`with Proxy(endpoint) as proxy:` and then `proxy.endpoint` is where clients go."""

    target: str
    heard: list[tuple[str, str, int]] = field(default_factory=list)
    """Method and path of every request that reached the server, and the status of its reply."""

    def __post_init__(self) -> None:
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            road = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def trouble(self, method: str, path: str, trouble: Trouble, times: float = 1) -> None:
        """What happens to the next so many requests of this kind, whose path has this in it."""
        with self._lock:
            self._plans.append(_Plan(method, re.compile(path), trouble, times))

    def calm(self) -> None:
        with self._lock:
            self._plans.clear()

    def count(self, method: str, path: str, status: int | None = None) -> int:
        """Requests that reached the server."""
        found = [answer for how, where, answer in self.heard if how == method and re.search(path, where)]
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
        self.heard.append((request.method, request.path, reply.status))
        return reply


class _Handler(BaseHTTPRequestHandler):
    road: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, list(self.headers.items()), body)
        try:
            reply = self.road.pass_on(request)
        except (OSError, http.client.HTTPException):
            reply = None  # the server is gone, and so is this line
        if reply is None:
            self._hang_up()
            return
        with suppress(OSError):  # a client that did not wait
            self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        length = len(reply.body)
        for name, value in reply.headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = int(value)
            elif name.lower() not in _HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client was faster
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        pass
