"""The HTTP server of a follower: wakes it, serves its metrics, tells how far it is.

    POST anything       looks for a new version now; answers 202
    GET /, /status      version, head, behind and trouble, as JSON
    GET /metrics        Prometheus' text format

Knows HTTP, and whom to ask; nothing of runs. It trusts nobody: what is sent is never read as anything but a knock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from weightwire.system import Closeable, HttpReply, HttpRequest, HttpServer, parse_address

__all__ = ["WakeupServer"]

_TIMEOUT = 5.0  # seconds, for a client that sends nothing


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
        self._wake, self._status, self._metrics = wake, status, metrics
        host, port = parse_address(address)
        self._server = HttpServer(
            host,
            [port],
            self._answer,
            name="weightwire-listen",
            methods=("GET", "POST"),
            timeout=_TIMEOUT,
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
        return HttpReply(404, "text/plain", b"there are /status and /metrics; POST wakes the follower\n")
