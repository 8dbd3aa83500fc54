"""The HTTP server of a follower: wakes it, and serves its readiness, status and metrics.

    POST (any path)     looks for a new version now; answers 202. The body may be its commit, as stored
    GET /healthz        200 while the follower runs
    GET /readyz         200 if it is ready, otherwise 503 with the reasons, as JSON
    GET /, /status      what it and its engines serve, as JSON
    GET /metrics        Prometheus' text format

Load balancers need no token for /healthz and /readyz, but get no reasons without it. `Access` decides who may send a
request, `Polling` how often a wake-up counts, and `PushedCommits` what a pushed commit is worth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightwire.chain import LARGEST_COMMIT
from weightwire.system import Access, Closeable, HttpReply, HttpRequest, HttpServer, parse_address

__all__ = ["WakeupServer"]

_TIMEOUT = 5.0  # seconds for a request, and for sending the reply
_PUBLIC = ("/healthz", "/readyz")


class WakeupServer(Closeable):
    """Listens from construction until `close`, in daemon threads.

    `address` is the actual address: with port 0 the system chooses a free port.
    """

    def __init__(
        self,
        address: str,
        *,
        wake: Callable[[bytes], None],
        status: Callable[[], Mapping[str, Any]],
        metrics: Callable[[], bytes],
        reasons: Callable[[], Sequence[str]] = tuple,
        access: Access | None = None,
    ) -> None:
        """`wake` receives the body of a wake-up. `reasons` returns why the follower is not ready, or nothing."""
        self._wake, self._status, self._metrics, self._reasons = wake, status, metrics, reasons
        host, port = parse_address(address)
        self._server = HttpServer(
            host,
            [port],
            self._answer,
            name="weightwire-listen",
            methods=("GET", "POST"),
            timeout=_TIMEOUT,
            access=access or Access(),
            public=_PUBLIC,
            most_body=LARGEST_COMMIT,
            options="",
        )
        self.address = self._server.address
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: HttpRequest) -> HttpReply:
        if request.method == "POST":
            self._wake(request.body)
            return HttpReply(202, "application/json", b"{}\n")
        if request.path in ("/", "/status"):
            return _as_json(200, self._status())
        if request.path == "/metrics":
            return HttpReply(200, "text/plain; version=0.0.4; charset=utf-8", self._metrics())
        if request.path == "/healthz":
            return _as_json(200, {"alive": True})
        if request.path == "/readyz":
            reasons = list(self._reasons())
            shown = {"reasons": reasons} if request.is_trusted else {}
            return _as_json(503 if reasons else 200, {"ready": not reasons, **shown})
        paths = "/status, /readyz, /healthz or /metrics"
        return HttpReply(404, "text/plain", f"not found: use GET {paths}, or POST to wake the follower\n".encode())


def _as_json(status: int, value: Mapping[str, Any]) -> HttpReply:
    return HttpReply(status, "application/json", json.dumps(value).encode() + b"\n")
