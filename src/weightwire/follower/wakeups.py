"""A door for others: wake the follower, fetch its metrics, ask how far it is.

    POST anything       looks for a new version now; answers 202
    GET /, /status      version, head, behind and trouble, as JSON
    GET /metrics        Prometheus' text format

Knows HTTP, and whom to ask; nothing of runs. It trusts nobody: what is sent is never read as anything but a knock.
"""

from __future__ import annotations

import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weightwire.errors import WeightwireError
from weightwire.system import Closeable, cannot_listen

__all__ = ["WakeupServer", "parse_address"]

_HERE = "127.0.0.1"
_PATIENCE = 5.0  # seconds, with one who says nothing
_MOST = 1 << 16  # bytes of a body that are read, to be thrown away
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]:|([^\s:\[\]/@]*):)?([0-9]{1,5})")


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or PORT on this machine alone."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found[3]) > 65535:
        raise WeightwireError(
            f"{text!r} is no address to listen on", hint="write HOST:PORT, or PORT alone for this machine only"
        )
    return found[1] or found[2] or _HERE, int(found[3])


class WakeupServer(Closeable):
    """Open from the start until `close`; it answers in threads of its own, which end with the program.

    `address` is where it really listens: port 0 takes any that is free.
    """

    def __init__(
        self,
        address: str,
        *,
        wake: Callable[[], None],
        status: Callable[[], Mapping[str, Any]],
        metrics: Callable[[], bytes],
    ) -> None:
        host, port = parse_address(address)
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(family, (str(place[0]), int(place[1])))
        except (OSError, UnicodeError) as problem:  # the latter from a host name that can be none
            raise cannot_listen(host, port, problem, options="") from problem
        self._server.wake, self._server.status, self._server.metrics = wake, status, metrics
        shown, port = self._server.server_address[:2]
        self.address = f"[{shown!s}]:{port}" if ":" in str(shown) else f"{shown!s}:{port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="weightwire-listen", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    wake: Callable[[], None]
    status: Callable[[], Mapping[str, Any]]
    metrics: Callable[[], bytes]

    def __init__(self, family: int, place: tuple[str, int]) -> None:
        self.address_family = family
        super().__init__(place, _Visit)

    def server_bind(self) -> None:
        # Without asking the network for the full name of this machine, which nobody needs and may take long.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One who left, or sent what is no HTTP. No reason for a traceback."""


class _Visit(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "weightwire", ""
    timeout = _PATIENCE

    def do_POST(self) -> None:
        self._drain()
        self._reply(self._wake)

    def do_GET(self) -> None:
        self._reply(self._look_up)

    def _wake(self) -> tuple[int, str, bytes]:
        self.server.wake()
        return 202, "application/json", b"{}\n"

    def _look_up(self) -> tuple[int, str, bytes]:
        path = self.path.partition("?")[0]
        if path in ("/", "/status"):
            return 200, "application/json", json.dumps(self.server.status()).encode() + b"\n"
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self.server.metrics()
        return 404, "text/plain", b"there are /status and /metrics; POST wakes the follower\n"

    def _reply(self, work: Callable[[], tuple[int, str, bytes]]) -> None:
        try:
            code, kind, body = work()
        except Exception:  # whatever it is, it must not end the follower, which may just be closing
            code, kind, body = 500, "text/plain", b"it cannot say just now\n"
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _drain(self) -> None:
        """Reads some of what was sent: to hang up on it would make the answer an error at the other end."""
        length = self.headers.get("Content-Length", "")
        with suppress(OSError):
            self.rfile.read(min(int(length), _MOST) if length.isascii() and length.isdecimal() else 0)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: whoever asks every few seconds would fill the log."""
