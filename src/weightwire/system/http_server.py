"""A small threaded HTTP server, and the addresses of every server, with their errors.

The server calls a function that it is given to answer each request. `access` decides which requests it answers. What a
stranger can cost is bounded: bytes and seconds per request, and connections.
"""

from __future__ import annotations

import errno
import io
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weightwire.errors import CannotListen
from weightwire.system.access import Access, Guard
from weightwire.system.closeable import Closeable

__all__ = [
    "HttpReply",
    "HttpRequest",
    "HttpServer",
    "cannot_listen",
    "format_address",
    "parse_address",
    "resolve",
]

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]:|([^\s:\[\]/@]*):)?([0-9]{1,5})")  # optionally a host, and a port
_HERE = "127.0.0.1"
_MOST = 1 << 16  # bytes of a request body that are read
_MOST_HEAD = 1 << 15  # bytes of the request line and the headers
_MOST_CONNECTIONS = 64


def parse_address(text: str) -> tuple[str, int]:
    """Parses HOST:PORT, or PORT alone for this machine only."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found[3]) > 65535:
        raise CannotListen(
            f"{text!r} is not an address to listen on", hint="use HOST:PORT, or PORT alone for this machine only"
        )
    return found[1] or found[2] or _HERE, int(found[3])


def resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """The address family and the address to bind to. Raises OSError, also for an invalid host name."""
    if not 0 <= port <= 65535:
        raise OSError(errno.EINVAL, "a port must be from 0 to 65535")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as problem:
        raise OSError(errno.EINVAL, str(problem)) from problem
    return family, (str(place[0]), int(place[1]))


def format_address(host: str, port: int) -> str:
    """HOST:PORT as in URLs: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_listen(host: str, port: int, problem: OSError, *, options: str = "--") -> CannotListen:
    """The error for an address that cannot be used. `options` is the prefix of the host and port options."""
    where = format_address(host, port)
    if problem.errno == errno.EADDRINUSE:
        hint = f"choose another {options}port, or 0 for any"
        return CannotListen(f"{where}: the port is in use by another program", hint=hint)
    reason = problem.strerror or str(problem)
    below = problem.errno == errno.EACCES
    hint = "choose a port from 1024 on: lower ones need root" if below else f"check {options}host and {options}port"
    return CannotListen(f"{where}: cannot listen ({reason})", hint=hint)


@dataclass(frozen=True)
class HttpRequest:
    """A request. The path has no query. `body` is empty if the server keeps none, or if it is too long."""

    method: str
    path: str
    headers: Message
    body: bytes = b""
    is_trusted: bool = True  # False: it lacks the token, and asks for one of the public paths


@dataclass(frozen=True)
class HttpReply:
    """A reply. A 304 has no body."""

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Service:
    """How a server answers requests."""

    answer: Callable[[HttpRequest], HttpReply]
    methods: tuple[str, ...]
    headers: Mapping[str, str]  # of every reply
    timeout: float
    guard: Guard
    public: frozenset[str] = frozenset()  # paths to GET without the token
    most_body: int = 0  # bytes; a longer body is dropped

    def reply_to(self, request: HttpRequest) -> HttpReply:
        turned = self.guard.turned(lambda name: request.headers.get_all(name, []))
        if turned is not None and turned.status == 401 and request.method == "GET" and request.path in self.public:
            request, turned = replace(request, is_trusted=False), None
        if turned is not None:
            return HttpReply(turned.status, "text/plain", turned.reason.encode() + b"\n", turned.headers)
        try:
            return self.answer(request)
        except Exception:  # a failed reply must not end the program, which may just be closing
            return HttpReply(500, "text/plain", b"temporarily unavailable\n")


class HttpServer(Closeable):
    """Listens at once, and answers from `start` until `close`, in daemon threads.

    Uses the first free port of `ports`; 0 means any free port. `address` is the actual address.
    """

    def __init__(
        self,
        host: str,
        ports: Iterable[int],
        answer: Callable[[HttpRequest], HttpReply],
        *,
        name: str,
        methods: tuple[str, ...],
        timeout: float,
        headers: Mapping[str, str] | None = None,
        access: Access | None = None,
        browser: bool = False,
        public: Iterable[str] = (),
        most_body: int = 0,
        options: str = "--",
    ) -> None:
        """`timeout` is for reading a request, and again for sending the reply. See `Guard` for `browser`.

        A body of more than `most_body` bytes is dropped.

        The paths in `public` need no token. Their answers must not tell much: see `HttpRequest.is_trusted`.
        """
        self._server, guard = _listen(
            host, list(ports), options, lambda place: Guard(access or Access(), host, place, browser=browser)
        )
        place, self.port = str(self._server.server_address[0]), int(self._server.server_address[1])
        self.address = format_address(place, self.port)
        self._server.service = _Service(answer, methods, headers or {}, timeout, guard, frozenset(public), most_body)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * _MOST_CONNECTIONS
    service: _Service

    def __init__(self, family: int, place: tuple[str, int]) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        # The base class looks up the full name of this machine, which may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Disconnects clients beyond the limit at once: each connection has a thread."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect or do not send HTTP."""


class _HeadTooLarge(Exception):
    """The request line and the headers are larger than the server reads."""


class _RequestStream(io.RawIOBase):
    """The bytes of a request, up to a time and a size: a client that sends one byte now and then is cut off, too."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        super().__init__()
        self._connection = connection
        self._until = time.monotonic() + seconds
        self._left: int | None = _MOST_HEAD

    def end_head(self) -> None:
        """Lifts the limit of size: the reader limits the body."""
        self._left = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self._left == 0:
            raise _HeadTooLarge
        self._connection.settimeout(seconds)
        with memoryview(buffer) as view:
            count = self._connection.recv_into(view if self._left is None else view[: self._left])
        if self._left is not None:
            self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "weightwire", ""

    def setup(self) -> None:
        super().setup()
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""  # for replies to half a request
        self._stream = _RequestStream(self.connection, self.server.service.timeout)
        self.rfile.close()
        self.rfile = io.BufferedReader(self._stream)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except _HeadTooLarge:
            self.close_connection = True
            self.send_error(431)

    def do_GET(self) -> None:
        self._stream.end_head()
        if self.command not in self.server.service.methods:
            self.send_error(501, f"Unsupported method ({self.command!r})")
            return
        body = self._read_body()
        self.connection.settimeout(self.server.service.timeout)
        request = HttpRequest(self.command, self.path.partition("?")[0], self.headers, body)
        self._send(self.server.service.reply_to(request))

    do_HEAD = do_POST = do_GET

    def _read_body(self) -> bytes:
        """The body, or nothing if it is too long or incomplete.

        Reads some of it in any case: if the connection closes before, the client sees an error instead of the reply.
        """
        length, most = self.headers.get("Content-Length", ""), self.server.service.most_body
        with suppress(OSError, ValueError):  # Python rejects numbers with more than 4,300 digits
            size = int(length) if length.isascii() and length.isdecimal() else 0
            body = self.rfile.read(min(size, max(most, _MOST)))
            return body if len(body) == size <= most else b""
        return b""

    def _send(self, reply: HttpReply) -> None:
        self.send_response(reply.status)
        if reply.status != 304:
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body)))
        for name, value in {**reply.headers, **self.server.service.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.status != 304 and self.command != "HEAD":
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: clients poll every second."""


def _listen(host: str, ports: list[int], options: str, guarded: Callable[[str], Guard]) -> tuple[_Server, Guard]:
    for port in ports:
        try:
            family, place = resolve(host, port)
            guard = guarded(place[0])  # before anyone can connect
            return _Server(family, place), guard
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE or port == ports[-1]:
                raise cannot_listen(host, port, problem, options=options) from problem
    raise AssertionError("no ports given")
