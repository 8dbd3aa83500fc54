"""The proxy of the rollout server: what it forwards, who may use it, and its limits."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from weightwire.follower import WakeupServer
from weightwire.system import Access, Guard

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


class Behind:
    """A server behind a proxy. It records all requests that it receives, and the bodies sent to /v1/echo."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.port = port  # of the proxy

    async def answer(self, request: Request) -> Response:
        self.seen.append((request.method, request.url.path))
        if request.url.path == "/v1/echo":
            self.bodies.append(await request.body())
        if request.url.path == "/v1/stream":
            return StreamingResponse(self._parts())
        return JSONResponse({})

    async def _parts(self) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(3600)

    async def send(self, head: str, body: bytes = b"", until: bytes = b"\r\n\r\n") -> bytes:
        """Sends a raw request. Returns the response up to the end of its head, or `until`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"{head}\r\nHost: here\r\n\r\n".encode() + body)
            async with asyncio.timeout(60):
                return await reader.readuntil(until)
        finally:
            writer.close()


def through_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Behind], Coroutine[Any, Any, None]],
    guard: Guard | None = None,
    gate: Any = None,
) -> Behind:
    monkeypatch.syspath_prepend(DEPLOY / "rollout")
    from filtering_proxy import FilteringProxy

    async def run() -> Behind:
        with socket.create_server(("127.0.0.1", 0)) as inside, socket.create_server(("127.0.0.1", 0)) as outside:
            behind = Behind(outside.getsockname()[1])
            app = Starlette(routes=[Route("/{path:path}", behind.answer, methods=["GET", "POST"])])
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
            serving = asyncio.create_task(server.serve(sockets=[inside]))
            proxy = FilteringProxy(outside, f"http://127.0.0.1:{inside.getsockname()[1]}", guard, gate)
            await proxy.open()
            try:
                await work(behind)
            finally:
                await proxy.close()
                server.should_exit = True
                await serving
            return behind

    return asyncio.run(run())


PACKED = zlib.compress(b" " * 100)
EMPTY = b"\x78\x01" + b"\x00\x00\x00\xff\xff" * 400 + b"\x01\x00\x00\xff\xff\x00\x00\x00\x01"  # decompresses to nothing


class TestProxy:
    def test_a_request_cannot_hide_in_the_body_of_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first body gets shorter when it is decompressed. The start of the second request must not be read as the
        rest of it, which would let a forbidden request through."""

        async def attack(behind: Behind) -> None:
            packed = f"Content-Encoding: deflate\r\nContent-Length: {len(EMPTY)}"
            await behind.send(f"POST /v1/models HTTP/1.1\r\n{packed}", EMPTY)
            hidden = b"\r\n" * 2000 + b"POST /pause HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n"
            await behind.send(f"POST /v1/echo HTTP/1.1\r\nContent-Length: {len(hidden)}", hidden)
            assert behind.bodies == [hidden]

        behind = through_a_proxy(monkeypatch, attack)
        assert [path for _, path in behind.seen] == ["/v1/models", "/v1/echo"]

    @pytest.mark.parametrize("length", [f"Content-Length: {len(PACKED)}", "Transfer-Encoding: chunked"])
    def test_a_compressed_body_is_forwarded_unchanged(self, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PACKED), PACKED)
            head = f"POST /v1/echo HTTP/1.1\r\nContent-Encoding: deflate\r\n{length}"
            assert b" 200 " in await behind.send(head, chunked if "chunked" in length else PACKED)

        assert through_a_proxy(monkeypatch, ask).bodies == [PACKED]

    def test_only_the_body_of_a_post_is_forwarded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            assert b" 200 " in await behind.send("GET /v1/echo HTTP/1.1\r\nContent-Length: 5", b"hello")

        assert through_a_proxy(monkeypatch, ask).bodies == [b""]

    def test_responses_are_streamed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            assert b" 200 " in await behind.send("GET /v1/stream HTTP/1.1", until=b"first")

        through_a_proxy(monkeypatch, ask)

    def test_malformed_http_is_rejected_without_a_traceback(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def ask(behind: Behind) -> None:
            for head in ("GET /v1/models HTTP/1.1\r\nContent-Length: x", "GET /v1/models HTTP/1.1\r\nno header"):
                assert b" 400 " in await behind.send(head)

        assert through_a_proxy(monkeypatch, ask).seen == []
        assert caplog.records == []

    def test_every_request_but_health_needs_the_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            assert b" 401 " in await behind.send("GET /v1/models HTTP/1.1")
            assert b" 401 " in await behind.send("GET /v1/models HTTP/1.1\r\nAuthorization: Bearer other")
            assert b" 404 " in await behind.send("GET /pause HTTP/1.1\r\nAuthorization: Bearer the-token")
            assert b" 200 " in await behind.send("GET /v1/models HTTP/1.1\r\nAuthorization: Bearer the-token")
            assert b" 200 " in await behind.send("GET /health HTTP/1.1")

        behind = through_a_proxy(monkeypatch, ask, Guard(Access("the-token"), "0.0.0.0", "0.0.0.0"))
        assert [path for _, path in behind.seen] == ["/v1/models", "/health"]

    @pytest.mark.parametrize("length", ["Content-Length: 3000", "Transfer-Encoding: chunked"])
    def test_a_large_body_is_refused(self, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            monkeypatch.setattr("filtering_proxy._MOST_BYTES", 2000)
            body = b"bb8\r\n" + bytes(3000) + b"\r\n0\r\n\r\n" if "chunked" in length else bytes(3000)
            assert b" 413 " in await behind.send(f"POST /v1/echo HTTP/1.1\r\n{length}", body)

        through_a_proxy(monkeypatch, ask)

    def test_a_slow_body_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            monkeypatch.setattr("filtering_proxy._BODY_SECONDS", 0.2)
            assert b" 408 " in await behind.send("POST /v1/echo HTTP/1.1\r\nContent-Length: 3000", b"part")

        through_a_proxy(monkeypatch, ask)

    def test_silent_and_surplus_connections_are_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answered = asyncio.Event()

        async def connect(behind: Behind, data: bytes) -> bool:
            """Whether the proxy closes the connection."""
            reader, writer = await asyncio.open_connection("127.0.0.1", behind.port)
            try:
                writer.write(data)
                async with asyncio.timeout(60):
                    while await reader.read(1000):
                        answered.set()
            except ConnectionError:
                pass
            except TimeoutError:
                return False
            finally:
                writer.close()
            return True

        async def ask(behind: Behind) -> None:
            import filtering_proxy

            whole = b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n"
            monkeypatch.setattr(filtering_proxy, "_HEAD_SECONDS", 0.1)
            assert await connect(behind, b"GET /v1/mod")
            due: asyncio.Queue[Any] = asyncio.Queue()
            close_if_silent = filtering_proxy._close_if_silent
            monkeypatch.setattr(filtering_proxy, "_close_if_silent", due.put_nowait)
            connected = asyncio.create_task(connect(behind, whole))
            await answered.wait()
            close_if_silent(await due.get())  # in time for any machine: the request has arrived
            await asyncio.sleep(0.5)
            assert not connected.done()
            connected.cancel()
            monkeypatch.setattr(filtering_proxy, "_MOST_CONNECTIONS", 0)
            assert await connect(behind, whole)

        through_a_proxy(monkeypatch, ask)


class TestReadiness:
    def test_nothing_is_forwarded_while_the_gate_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = SimpleNamespace(is_open=False)

        async def ask(behind: Behind) -> None:
            for line in ("POST /v1/completions", "POST /inference/v1/generate", "GET /v1/models", "GET /health"):
                assert b" 503 " in await behind.send(f"{line} HTTP/1.1\r\nContent-Length: 0"), line
            reply = await behind.send("GET /readyz HTTP/1.1", until=b"}")
            assert b" 503 " in reply
            assert b"Retry-After: 1" in reply
            assert b'{"ready": false, "error": "not ready"}' in reply
            assert b" 200 " in await behind.send("GET /healthz HTTP/1.1")
            assert b" 200 " in await behind.send("GET /weight_info HTTP/1.1")
            assert b" 404 " in await behind.send("POST /pause HTTP/1.1\r\nContent-Length: 0")
            gate.is_open = True
            for line in ("POST /v1/completions", "GET /health", "GET /readyz"):
                assert b" 200 " in await behind.send(f"{line} HTTP/1.1\r\nContent-Length: 0"), line

        behind = through_a_proxy(monkeypatch, ask, gate=gate)
        assert [path for _, path in behind.seen] == ["/weight_info", "/v1/completions", "/health"]

    def test_closed_gate_does_not_replace_the_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            assert b" 401 " in await behind.send("GET /v1/models HTTP/1.1")
            assert b" 401 " in await behind.send("GET /weight_info HTTP/1.1")
            assert b" 503 " in await behind.send("GET /readyz HTTP/1.1")
            assert b" 503 " in await behind.send("GET /health HTTP/1.1")
            assert b" 200 " in await behind.send("GET /healthz HTTP/1.1")

        guard = Guard(Access("the-token"), "0.0.0.0", "0.0.0.0")
        assert through_a_proxy(monkeypatch, ask, guard, SimpleNamespace(is_open=False)).seen == []

    def test_gate_is_open_while_the_follower_is_ready(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(DEPLOY / "rollout")
        import ready_gate

        monkeypatch.setattr(ready_gate, "_EVERY", 0.02)
        monkeypatch.setattr(ready_gate, "_TIMEOUT", 60.0)
        said: list[str] = []
        reasons: list[str] = ["it serves no version"]

        async def until(check: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not check():
                    await asyncio.sleep(0.01)

        async def watch(url: str) -> None:
            gate = ready_gate.ReadyGate(url, said.append)
            watching = asyncio.create_task(gate.watch())
            await asyncio.sleep(0.1)
            assert not gate.is_open
            reasons.clear()
            await gate.opened()
            assert gate.is_open
            reasons.append("it hangs")
            await until(lambda: not gate.is_open)
            reasons.clear()
            await until(lambda: len(said) == 2)
            server.close()
            await until(lambda: not gate.is_open)
            watching.cancel()

        with WakeupServer("0", wake=lambda body: None, status=dict, metrics=bytes, reasons=lambda: reasons) as server:
            asyncio.run(watch(f"http://{server.address}/readyz"))
        assert said[:2] == ["not ready: clients get 503 until this has passed", "ready again"]
