"""A socket, and uvicorn behind it in a thread of its own.

Knows addresses, the names that it may be asked by, and how to stop in time; not what is served.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightwire.server.completion_api import error_body
from weightwire.system import Closeable, cannot_listen, format_address, is_local_request, is_loopback, resolve

__all__ = ["HttpListener"]

_PATIENCE = 2  # seconds for answers that are on their way, once it is to stop
_IDLE = 60  # seconds that a connection may rest: clients that think for long use theirs again
_BACKLOG = 2048  # connections that may come at once


class HttpListener(Closeable):
    """Open from the start until `close`. `url` is where it really listens: port 0 takes any that is free.

    At an address of this machine only, it answers to this machine's own names only.
    """

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        place, port = self._socket.getsockname()[:2]
        self.url = f"http://{format_address(place, port)}"
        config = uvicorn.Config(
            _Local(app, host) if is_loopback(place) else app,
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
        """Takes no more requests; those that run are answered, or cut off in the end."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class _Local:
    """An app that is asked by names of this machine, and by the one that it was started with."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host")
        if is_local_request(hosts, self._host):
            await self._app(scope, receive, send)
            return
        told = error_body(403, "this server is for this machine only: ask it as 127.0.0.1 or localhost")
        await Response(msgspec.json.encode(told), 403, media_type="application/json")(scope, receive, send)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, place = resolve(host, port)
        # Listen at once: two programs could bind the same port, but only one can listen on it.
        return socket.create_server(place, family=family, backlog=_BACKLOG)
    except OSError as problem:
        raise cannot_listen(host, port, problem) from problem
