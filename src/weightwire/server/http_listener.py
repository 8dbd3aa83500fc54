"""A socket with uvicorn behind it, in its own thread. Connections, headers and their time are limited."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from weightwire.server.api_reply import json_reply
from weightwire.server.refusal import error_body
from weightwire.system import Access, Closeable, Guard, cannot_listen, format_address, resolve

__all__ = ["HttpListener"]

_PATIENCE = 2  # seconds for running requests at shutdown
_IDLE = 60  # seconds that an idle connection stays open
_HEAD = 10  # seconds until the headers of the first request must be there
_MOST_HEAD = 1 << 15  # bytes of them
_UNREAD = 60  # seconds that a client may leave a full buffer unread
_MOST_CONNECTIONS = 1024
_BACKLOG = 2048  # pending connections
_OPEN = {"/health", "/healthz", "/readyz"}  # paths without a token, for load balancers


class HttpListener(Closeable):
    """Listens from construction until `close`. `url` is the actual address: port 0 means any free port."""

    def __init__(self, app: Any, host: str, port: int, *, access: Access | None = None) -> None:
        self._socket, guard = _listen(host, port, access or Access())
        place, port = self._socket.getsockname()[:2]
        self.url = f"http://{format_address(place, port)}"
        config = uvicorn.Config(
            _Guarded(app, guard),
            http=_BoundedProtocol,
            h11_max_incomplete_event_size=_MOST_HEAD,
            access_log=False,
            log_config=None,
            log_level="critical",
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_PATIENCE,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="weightwire-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops accepting requests. Running ones get a short time to finish."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class _BoundedProtocol(H11Protocol):
    """Disconnects clients beyond the limit, and those that do not send a whole head or read an answer in time."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
        else:
            self._expect_head(_HEAD)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        # uvicorn's own timer ends with the first byte, also with one of a body that nobody reads.
        self._expect_head(_IDLE)
        super().on_response_complete()
        if not self.cycle.response_complete:  # the next request was there already
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._unread = self.loop.call_later(_UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _expect_head(self, seconds: float) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None


class _Guarded:
    """An app that answers only the requests that the guard lets through."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turned = self._guard.turned(Headers(scope=scope).getlist)
        if turned is None or (turned.status == 401 and scope.get("path") in _OPEN):
            await self._app(scope, receive, send)
            return
        response = json_reply(error_body(turned.status, turned.reason), turned.status)
        response.headers.update(turned.headers)
        await response(scope, receive, send)


def _listen(host: str, port: int, access: Access) -> tuple[socket.socket, Guard]:
    try:
        family, place = resolve(host, port)
        guard = Guard(access, host, place[0])
        # Listen at once: two programs could bind the same port, but only one can listen on it.
        return socket.create_server(place, family=family, backlog=_BACKLOG), guard
    except OSError as problem:
        raise cannot_listen(host, port, problem) from problem
