"""The only way in from outside: what clients need of vLLM goes through, all else is refused.

vLLM in developer mode lets whoever reaches its port pause it, load other weights, and call any method of its workers;
its API key guards none of that. So it listens on this machine only, and this stands before it. Knows HTTP and which
paths are harmless; nothing of weights.
"""

from __future__ import annotations

import logging
import re
import socket

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

__all__ = ["FilteringProxy"]

# Whole paths, of plain names: nothing that another server could read as a way out of /v1.
_OPEN = re.compile(
    r"GET /(health|weight_info)|(GET|POST|OPTIONS) /v1(/[A-Za-z0-9_-]+)+|(POST|OPTIONS) /inference/v1/generate"
)
# What concerns one connection, and not what is sent over it.
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
# The proxy itself tells vLLM where a body ends. If vLLM trusted the client's length instead, and that were wrong,
# the rest of a body would be read as a request of its own, which nobody has looked at.
_SAID_ANEW = _HOP | {"content-length"}

_log = logging.getLogger("weightwire.proxy")
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


class FilteringProxy:
    """`await open()` once the server behind it is ready; answers pass through as they come, token by token."""

    def __init__(self, outside: socket.socket, server: str) -> None:
        self._socket = outside
        self._server = server
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        # As many requests as come, for as long as they take: vLLM has limits of its own. Each has a connection of its
        # own, so that nothing of one client's can ever be taken for the beginning of another's.
        connector, timeout = TCPConnector(limit=0, force_close=True), ClientTimeout(total=None, sock_connect=10)
        self._session = ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        # A client that leaves ends its request behind the proxy too: nobody would read the answer. Bodies pass as they
        # came: one that was unpacked here would no longer be what its Content-Encoding says.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, auto_decompress=False, shutdown_timeout=1.0, logger=_log
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

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
                headers=_forwarded(request.headers, _SAID_ANEW),
                data=request.content if request.method == "POST" and request.can_read_body else None,
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=_forwarded(answer.headers, _HOP))
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except ClientError as problem:
            if response is None:
                return web.json_response({"error": f"vLLM does not answer ({problem})"}, status=502)
            raise  # cut off: a proper end would look like all of it


def _forwarded(headers: CIMultiDictProxy[str], without: set[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in without)
