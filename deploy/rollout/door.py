"""The only way in from outside: what clients need of vLLM goes through, all else is refused.

vLLM in developer mode lets whoever reaches its port pause it, load other weights, and call any method of its workers;
its API key guards none of that. So it listens on this machine only, and this stands before it. Knows HTTP and which
paths are harmless; nothing of weights.
"""

from __future__ import annotations

import re
import socket

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

__all__ = ["Door"]

# Whole paths, of plain names: nothing that another server could read as a way out of /v1.
_OPEN = re.compile(
    r"GET /(health|weight_info)|(GET|POST|OPTIONS) /v1(/[A-Za-z0-9_-]+)+|(POST|OPTIONS) /inference/v1/generate"
)
# What concerns one connection, and not what is sent over it.
_HOP = {"connection", "host", "keep-alive", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}


class Door:
    """`await open()` once the server behind it is ready; answers pass through as they come, token by token."""

    def __init__(self, outside: socket.socket, server: str) -> None:
        self._socket = outside
        self._server = server
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        # As many requests as come, for as long as they take: vLLM has limits of its own.
        connector, timeout = TCPConnector(limit=0), ClientTimeout(total=None, sock_connect=10)
        self._session = ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        # A client that leaves ends its request behind the door too: nobody would read the answer.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket, shutdown_timeout=1.0).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if not _OPEN.fullmatch(f"{request.method} {path}"):
            return web.json_response({"error": f"{request.method} {path}: is not open to the outside"}, status=404)
        assert self._session is not None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(self._server + request.raw_path, encoded=True),
                headers=_forwarded(request.headers),
                data=request.content if request.can_read_body else None,
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_forwarded(answer.headers))
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except ClientError as problem:
            if response is None:
                return web.json_response({"error": f"vLLM does not answer ({problem})"}, status=502)
            raise  # cut off: a proper end would look like all of it


def _forwarded(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP)
