"""The HTTP server of a follower: wakes it, and serves its metrics and status.

    POST (any path)     looks for a new version now; answers 202
    GET /, /status      version, head, behind and trouble, as JSON
    GET /metrics        Prometheus' text format

It ignores the body of every request. `Access` decides who may send one, and `Polling` how often a wake-up counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from weightwire.system import Access, Closeable, HttpReply, HttpRequest, HttpServer, parse_address

__all__ = ["WakeupServer"]

_TIMEOUT = 5.0  # seconds for a request, and for sending the reply


class WakeupServer(Closeable):
    """Listens from construction until `close`, in daemon threads.

    `address` is the actual address: with port 0 the system chooses a free port.
    """

    def __init__(
        self,
        address: str,
        *,
        wake: Callable[[], None],
        status: Callable[[], Mapping[str, Any]],
        metrics: Callable[[], bytes],
        access: Access | None = None,
    ) -> None:
        self._wake, self._status, self._metrics = wake, status, metrics
        host, port = parse_address(address)
        self._server = HttpServer(
            host,
            [port],
            self._answer,
            name="weightwire-listen",
            methods=("GET", "POST"),
            timeout=_TIMEOUT,
            access=access or Access(),
            options="",
        )
        self.address = self._server.address
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: HttpRequest) -> HttpReply:
        if request.method == "POST":
            self._wake()
            return HttpReply(202, "application/json", b"{}\n")
        if request.path in ("/", "/status"):
            return HttpReply(200, "application/json", json.dumps(self._status()).encode() + b"\n")
        if request.path == "/metrics":
            return HttpReply(200, "text/plain; version=0.0.4; charset=utf-8", self._metrics())
        return HttpReply(404, "text/plain", b"not found: use GET /status or /metrics, or POST to wake the follower\n")
