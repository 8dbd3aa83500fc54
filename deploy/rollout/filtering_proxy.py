"""The public entrance to vLLM: forwards the paths that clients need and rejects all others.

In developer mode, everyone who reaches vLLM's port can pause it, load other weights and call any method of its workers.
Its API key does not protect these calls. So vLLM listens on localhost only, behind this proxy. Knows HTTP, the safe
paths, who may use them and when, and limits. Knows nothing of weights.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from ready_gate import ReadyGate
from yarl import URL

from weightwire.system import Guard

__all__ = ["FilteringProxy"]

# Whole paths with plain names: no server can interpret one of them as a path outside of /v1.
_OPEN = re.compile(
    r"GET /(health|healthz|readyz|weight_info)"
    r"|(GET|POST|OPTIONS) /v1(/[A-Za-z0-9_-]+)+|(POST|OPTIONS) /inference/v1/generate"
)
_WITHOUT_TOKEN = {"/health", "/healthz", "/readyz"}  # load balancers use them
_WHEN_NOT_READY = {"/weight_info"}  # trainers wait for a version with it
# Headers of one connection, not of the message.
_HOP = {
    "connection",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# The proxy sets the length of the body itself. If vLLM trusted a wrong length from the client, it would read the rest
# of the body as another request, which the proxy has not checked (request smuggling).
_REPLACED = _HOP | {"content-length"}

_MOST_CONNECTIONS = 1024
_HEAD_SECONDS = 10.0  # until the first request of a connection must be there
_IDLE = 60.0  # seconds between two requests of a connection
_MOST_BYTES, _BODY_SECONDS = 64 << 20, 60.0  # of a request

_log = logging.getLogger("weightwire.proxy")
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


class FilteringProxy:
    """Call `open()` when the server behind it runs. Responses are streamed, token by token.

    While `gate` is closed, clients get 503, also from `GET /health` and `GET /readyz`.
    """

    def __init__(
        self, outside: socket.socket, server: str, guard: Guard | None = None, gate: ReadyGate | None = None
    ) -> None:
        self._socket = outside
        self._server = server
        self._guard = guard
        self._gate = gate
        self._listening: asyncio.Server | None = None
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        # No limit on the duration of an answer: vLLM has its own. Each request gets a new connection, so no
        # bytes of one client can become the start of another client's request.
        connector, timeout = TCPConnector(limit=0, force_close=True), ClientTimeout(total=None, sock_connect=10)
        self._session = ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        # If a client disconnects, its request to vLLM is cancelled. Bodies stay compressed: they must match their
        # Content-Encoding header.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=_IDLE,
            shutdown_timeout=1.0,
            logger=_log,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connection, sock=self._socket, backlog=128)

    def _connection(self) -> asyncio.Protocol:
        """The handler of a new connection."""
        assert self._runner is not None
        assert self._runner.server is not None
        if len(self._runner.server.connections) >= _MOST_CONNECTIONS:
            return _Refused()
        handler = self._runner.server()
        asyncio.get_running_loop().call_later(_HEAD_SECONDS, _close_if_silent, handler)
        return handler

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if not _OPEN.fullmatch(f"{request.method} {path}"):
            return web.json_response(
                {"error": f"{request.method} {path}: not available through this proxy"}, status=404
            )
        turned = self._guard and self._guard.turned(lambda name: request.headers.getall(name, []))
        if turned and not (turned.status == 401 and path in _WITHOUT_TOKEN):
            return web.json_response({"error": turned.reason}, status=turned.status, headers=turned.headers)
        if path == "/healthz":
            return web.json_response({"alive": True})
        if self._gate and not self._gate.is_open and path not in _WHEN_NOT_READY:
            # Not the reasons: they name the bucket and servers behind the proxy.
            headers = {"Retry-After": "1"}
            return web.json_response({"ready": False, "error": "not ready"}, status=503, headers=headers)
        if path == "/readyz":
            return web.json_response({"ready": True})
        assert self._session is not None
        body = _Body(request)
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(self._server + request.raw_path, encoded=True),
                headers=_without(request.headers, _REPLACED),
                data=body.parts() if request.method == "POST" and request.can_read_body else None,
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_without(answer.headers, _HOP))
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except ClientError as problem:
            if response is None and body.problem:
                return web.json_response({"error": body.problem[1]}, status=body.problem[0])
            if response is None:
                return web.json_response({"error": f"vLLM does not answer ({problem})"}, status=502)
            raise  # break the connection: a regular end would look like a complete response


class _Body:
    """The body of a request, up to a size and a time. `problem` has the status and the reason if it exceeds one."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.problem: tuple[int, str] | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        size, until = 0, asyncio.get_running_loop().time() + _BODY_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(until):
                    part = await self._request.content.readany()
            except TimeoutError as problem:
                self.problem = 408, f"the request did not arrive within {_BODY_SECONDS:.0f} seconds"
                raise ConnectionError from problem
            size += len(part)
            if size > _MOST_BYTES:
                self.problem = 413, f"the request is larger than {_MOST_BYTES >> 20} MiB"
                raise ConnectionError
            if not part:
                return
            yield part


class _Refused(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _close_if_silent(handler: web.RequestHandler) -> None:
    """aiohttp limits the time between requests, but not the time until the first."""
    if not handler._request_count and handler.transport is not None:
        handler.transport.abort()


def _without(headers: CIMultiDictProxy[str], names: set[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in names)
