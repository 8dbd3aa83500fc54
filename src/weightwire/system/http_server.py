"""A small HTTP server in threads of its own, and the rules for any server: Host headers, addresses that are taken.

Knows HTTP and addresses; what is asked for is answered by a function that it is given.
"""

from __future__ import annotations

import errno
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from weightwire.errors import CannotListen
from weightwire.system.closeable import Closeable

__all__ = [
    "HttpReply",
    "HttpRequest",
    "HttpServer",
    "cannot_listen",
    "format_address",
    "is_local_request",
    "is_loopback",
    "name_in",
    "parse_address",
    "resolve",
]

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+))(?::[0-9]*)?")  # a name and maybe a port
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]:|([^\s:\[\]/@]*):)?([0-9]{1,5})")  # maybe a host, and a port
_HERE = "127.0.0.1"
_MOST = 1 << 16  # bytes of a body that are read, to be thrown away


def name_in(host: str) -> str:
    """The name in a Host header, without the port; empty if it is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:  # not an IP address
        return False


def is_local_request(hosts: Sequence[str], host: str) -> bool:
    """Whether a request names this machine, or the `host` that the server was started with.

    `hosts` are its Host headers: exactly one is allowed, so that a proxy cannot check another one than the server. A
    server on a loopback address must reject other names: otherwise the scripts of a web site whose DNS name points to
    127.0.0.1 can read what it serves.
    """
    name = name_in(hosts[0]) if len(hosts) == 1 else ""
    return bool(name) and (name in ("localhost", host.lower()) or is_loopback(name))


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or PORT on this machine alone."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found[3]) > 65535:
        raise CannotListen(
            f"{text!r} is no address to listen on", hint="write HOST:PORT, or PORT alone for this machine only"
        )
    return found[1] or found[2] or _HERE, int(found[3])


def resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """The address family and the address to bind to. Raises OSError, also for text that cannot be a host name."""
    if not 0 <= port <= 65535:
        raise OSError(errno.EINVAL, "ports are from 0 to 65535")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as problem:
        raise OSError(errno.EINVAL, str(problem)) from problem
    return family, (str(place[0]), int(place[1]))


def format_address(host: str, port: int) -> str:
    """HOST:PORT as it is written in URLs: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_listen(host: str, port: int, problem: OSError, *, options: str = "--") -> CannotListen:
    """The error for an address that cannot be listened on; `options` is how host and port are asked for."""
    where = format_address(host, port)
    if problem.errno == errno.EADDRINUSE:
        hint = f"choose another {options}port, or 0 for any"
        return CannotListen(f"{where}: another program listens there already", hint=hint)
    reason = problem.strerror or str(problem)
    below = problem.errno == errno.EACCES
    hint = "ports below 1024 are for root: choose another" if below else f"check {options}host and {options}port"
    return CannotListen(f"{where}: cannot be listened on ({reason})", hint=hint)


@dataclass(frozen=True)
class HttpRequest:
    """What was asked for. The path is without the query; a body is never looked at."""

    method: str
    path: str
    headers: Message


@dataclass(frozen=True)
class HttpReply:
    """What is sent back. A 304 has no body."""

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Service:
    """What a server does with requests."""

    answer: Callable[[HttpRequest], HttpReply]
    methods: tuple[str, ...]
    headers: Mapping[str, str]  # of every reply
    timeout: float
    only_host: str | None  # rejects requests that name another host than this one, or this machine

    def reply_to(self, request: HttpRequest) -> HttpReply:
        hosts = request.headers.get_all("Host", [])
        if self.only_host is not None and not is_local_request(hosts, self.only_host):
            return HttpReply(403, "text/plain", b"this server is for this machine only\n")
        try:
            return self.answer(request)
        except Exception:  # a failed reply must not end the program around the server, which may just be closing
            return HttpReply(500, "text/plain", b"no answer is available right now\n")


class HttpServer(Closeable):
    """Listens from the start, answers from `start` until `close`, in threads that end with the program.

    It takes the first free one of `ports`. `address` is where it really listens: port 0 takes any that is free.
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
        check_host: bool = False,
        options: str = "--",
    ) -> None:
        """`check_host` rejects foreign Host headers where it listens on a loopback address."""
        self._server = _listen(host, list(ports), options)
        place, self.port = str(self._server.server_address[0]), int(self._server.server_address[1])
        self.address = format_address(place, self.port)
        only_host = host if check_host and is_loopback(place) else None
        self._server.service = _Service(answer, methods, headers or {}, timeout, only_host)
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
    service: _Service

    def __init__(self, family: int, place: tuple[str, int]) -> None:
        self.address_family = family
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        # Without asking the network for the full name of this machine, which nobody needs and may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnected, or did not send HTTP: not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "weightwire", ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.service.timeout)

    def do_GET(self) -> None:
        if self.command not in self.server.service.methods:
            self.send_error(501, f"Unsupported method ({self.command!r})")
            return
        self._drain()
        self._send(self.server.service.reply_to(HttpRequest(self.command, self.path.partition("?")[0], self.headers)))

    do_HEAD = do_POST = do_GET

    def _drain(self) -> None:
        """Reads some of the body: closing the connection before would make the reply an error at the other end."""
        length = self.headers.get("Content-Length", "")
        with suppress(OSError, ValueError):  # Python reads no number of more than 4,300 digits
            self.rfile.read(min(int(length), _MOST) if length.isascii() and length.isdecimal() else 0)

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
        """Nothing: clients that ask every second would fill the log."""


def _listen(host: str, ports: list[int], options: str) -> _Server:
    for port in ports:
        try:
            return _Server(*resolve(host, port))
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE or port == ports[-1]:
                raise cannot_listen(host, port, problem, options=options) from problem
    raise AssertionError("there is always a port to try")
