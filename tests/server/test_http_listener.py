"""The server's address, who may use it, its limits and its shutdown."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.followers import until
from weightwire.errors import CannotListen
from weightwire.server import http_listener
from weightwire.server.event_stream import EventStream
from weightwire.server.http_listener import HttpListener
from weightwire.system import Access


async def _sleep(request: Request) -> PlainTextResponse:
    await asyncio.sleep(float(request.path_params["seconds"]))
    return PlainTextResponse("slept")


RELEASED = threading.Event()
HELD: list[str] = []  # requests that have begun to wait for it


async def _hold(request: Request) -> PlainTextResponse:
    HELD.append("held")
    while not RELEASED.is_set():
        await asyncio.sleep(0.01)
    return PlainTextResponse("slept")


async def _health(request: Request) -> PlainTextResponse:
    return PlainTextResponse("healthy")


FLOOD = 64 << 20  # bytes; more than a socket takes
FLOODED: list[str] = []  # how each flood ended


async def _flood(request: Request) -> EventStream:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(FLOOD >> 16):
            yield bytes(1 << 16)
            await asyncio.sleep(0)
        while not RELEASED.is_set():
            await asyncio.sleep(0.01)
        yield b"last"
        FLOODED.append("whole")

    return EventStream(events(), on_close=lambda: FLOODED.append("closed"))


APP = Starlette(
    routes=[
        Route("/sleep/{seconds}", _sleep),
        Route("/hold", _hold),
        Route("/health", _health),
        Route("/readyz", _health),
        Route("/flood", _flood),
    ]
)


@pytest.fixture(autouse=True)
def _released() -> None:
    RELEASED.clear()
    HELD.clear()
    FLOODED.clear()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return str(reply.read().decode())


def test_port_0_takes_any_free_port() -> None:
    with HttpListener(APP, "127.0.0.1", 0) as listening:
        assert get(f"{listening.url}/sleep/0") == "slept"
    with pytest.raises(urllib.error.URLError):
        get(f"{listening.url}/sleep/0")


def test_a_port_can_be_used_again_at_once() -> None:
    port = 0
    for _ in range(2):
        with HttpListener(APP, "127.0.0.1", port) as listening:
            assert get(f"{listening.url}/sleep/0") == "slept"
            port = int(listening.url.rpartition(":")[2])


def test_a_port_in_use_is_an_error() -> None:
    with HttpListener(APP, "127.0.0.1", 0) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: the port is in use by another program"):
            HttpListener(APP, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "192.0.2.1"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(CannotListen, match="cannot listen"):
        HttpListener(APP, host, 0, access=Access("t" * 32))


def status(url: str, *headers: str, path: str = "/sleep/0") -> int:
    """The status of a request with exactly these headers."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([f"GET {path} HTTP/1.1", *headers, "Connection: close", "", ""]).encode())
        return int(connection.makefile().readline().split()[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HttpListener(APP, "127.0.0.1", 0) as listening:
        yield listening.url


class TestHostHeader:
    @pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LocalHost", "[::1]", "127.0.0.2"])
    def test_local_host_header_is_accepted_with_any_port(self, url: str, name: str) -> None:
        for port in ("", ":1", url[url.rindex(":") :]):
            assert status(url, f"Host: {name}{port}") == 200

    @pytest.mark.parametrize(
        "name",
        [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[::1]evil.example",
            "[::1]evil.example:80",
            "[::1].evil.example",
            "evil.example[::1]",
            "localhost:evil",
            "localhost:80:80",
            "192.0.2.1",
            "0.0.0.0",
            "[::2]",
            "[::1",
            "[]",
            "",
        ],
    )
    def test_host_header_of_another_machine_is_refused(self, url: str, name: str) -> None:
        assert status(url, f"Host: {name}") == 403

    def test_missing_or_repeated_host_header_is_refused(self, url: str) -> None:
        assert status(url) in (400, 403)
        assert status(url, "Host: localhost", "Host: evil.example") in (400, 403)

    def test_host_header_of_the_configured_host_is_accepted(self) -> None:
        with HttpListener(APP, "LOCALHOST", 0) as listening:
            assert status(listening.url, "Host: localhost:80") == 200
            assert status(listening.url, "Host: evil.example") == 403

    def test_any_host_header_is_accepted_on_a_public_address(self) -> None:
        with HttpListener(APP, "0.0.0.0", 0, access=Access(insecure=True)) as listening:
            assert status(listening.url, "Host: rollout-3.cluster:8000") == 200

    def test_requests_of_other_web_sites_are_refused(self, url: str) -> None:
        assert status(url, "Host: localhost:8000", "Origin: http://evil.example") == 403
        assert status(url, "Host: localhost:8000", "Origin: http://localhost:8000") == 200


class TestToken:
    def test_a_public_address_needs_a_token(self) -> None:
        with pytest.raises(CannotListen, match="cannot listen beyond this machine without a token"):
            HttpListener(APP, "0.0.0.0", 0)

    def test_every_request_but_health_needs_the_token(self) -> None:
        with HttpListener(APP, "0.0.0.0", 0, access=Access("t" * 32)) as listening:
            host = "Host: rollout-3.cluster:8000"
            assert status(listening.url, host) == 401
            assert status(listening.url, host, "Authorization: Bearer " + "u" * 32) == 401
            assert status(listening.url, host, "Authorization: Bearer " + "t" * 32) == 200
            assert status(listening.url, host, path="/health") == 200
            assert status(listening.url, host, path="/readyz") == 200
            assert status(listening.url, host, path="/flood") == 401
            assert status(listening.url, host, path="/health/") == 401
            assert status(listening.url, host, path="/sleep/0?/health") == 401


class TestLimits:
    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_listener, "_HEAD", 120)

    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_listener, "_HEAD", 0.3)
        monkeypatch.setattr(http_listener, "_IDLE", 0.3)

    @pytest.fixture
    def protocols(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The server's side of each connection. A timer of it that runs would close it sooner or later."""
        made: list[Any] = []

        class Noted(http_listener._BoundedProtocol):
            def connection_made(self, transport: Any) -> None:
                made.append(self)
                super().connection_made(transport)

        monkeypatch.setattr(http_listener, "_BoundedProtocol", Noted)
        return made

    @pytest.fixture
    def connected(self, protocols: list[Any]) -> Iterator[socket.socket]:
        with HttpListener(APP, "127.0.0.1", 0) as listening:
            host, _, port = listening.url.removeprefix("http://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                yield connection
            RELEASED.set()

    def drip(self, url: str, head: bytes) -> float:
        """Sends a head, and a byte now and then until the server disconnects. Returns the seconds."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        began = time.monotonic()
        with socket.create_connection((host, int(port)), timeout=0.05) as connection, suppress(ConnectionError):
            connection.sendall(head)
            while time.monotonic() - began < 60:
                connection.sendall(b"a")
                with suppress(TimeoutError):
                    if connection.recv(1000) == b"":
                        break
        return time.monotonic() - began

    @pytest.mark.usefixtures("impatient")
    def test_a_silent_client_is_disconnected(self, connected: socket.socket) -> None:
        with suppress(ConnectionResetError):
            assert connected.recv(1) == b""

    @pytest.mark.usefixtures("impatient")
    def test_slow_headers_are_cut_off(self, url: str) -> None:
        assert 0.2 < self.drip(url, b"GET /sleep/0 HTTP/1.1\r\nHost: ") < 60

    @pytest.mark.usefixtures("impatient")
    def test_a_slow_body_that_nobody_reads_is_cut_off(self, url: str) -> None:
        head = b"GET /sleep/0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        assert 0.2 < self.drip(url, head) < 60

    def test_a_long_request_and_the_next_one_are_answered(self, connected: socket.socket, protocols: list[Any]) -> None:
        for _ in range(3):
            RELEASED.clear()
            HELD.clear()
            connected.sendall(b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: HELD)
            assert protocols[0]._late is None
            RELEASED.set()
            reply = b""
            while not reply.endswith(b"slept"):
                reply += connected.recv(1000) or pytest.fail("disconnected")
            until(lambda: protocols[0]._late)

    def test_pipelined_requests_are_answered(self, connected: socket.socket, protocols: list[Any]) -> None:
        both = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in ("/health", "/hold")]
        connected.sendall("".join(both).encode())
        until(lambda: HELD)
        assert protocols[0]._late is None
        RELEASED.set()
        reply = b""
        while not reply.endswith(b"slept"):
            reply += connected.recv(1000) or pytest.fail("disconnected")
        assert b"healthy" in reply

    def test_a_client_that_does_not_read_is_disconnected(
        self, connected: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_listener, "_UNREAD", 0.3)
        connected.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: FLOODED)
        assert FLOODED == ["closed"]

    def test_a_client_that_reads_gets_all(self, connected: socket.socket, protocols: list[Any]) -> None:
        connected.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        until(lambda: protocols and protocols[0]._unread)
        size = 0
        while size < FLOOD:
            size += len(connected.recv(1 << 22) or pytest.fail("disconnected"))
        until(lambda: protocols[0]._unread is None)
        RELEASED.set()
        while data := connected.recv(1 << 22):
            size += len(data)
        assert size > FLOOD
        assert FLOODED[0] == "whole"

    def test_large_headers_are_refused(self, connected: socket.socket) -> None:
        head = b"GET /sleep/0 HTTP/1.1\r\nA: "
        connected.sendall(head.ljust((1 << 15) + 1, b"b"))  # not more, or a reset could overtake the reply
        assert connected.recv(12) == b"HTTP/1.1 400"

    def test_connections_are_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_listener, "_MOST_CONNECTIONS", 3)
        with HttpListener(APP, "127.0.0.1", 0) as listening, ExitStack() as stack:
            host, _, port = listening.url.removeprefix("http://").rpartition(":")
            many = [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(6)]
            gone = 0
            for one in many[3:]:
                with suppress(ConnectionResetError):
                    assert one.recv(1) == b""
                gone += 1
            assert gone == 3
            many[0].sendall(b"GET /sleep/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert many[0].recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("patience", [0.2, 120])
def test_close_finishes_running_requests_and_cuts_off_slow_ones(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "_PATIENCE", patience)
    listening = HttpListener(APP, "127.0.0.1", 0)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(get, f"{listening.url}/hold")
        until(lambda: HELD)
        closing = pool.submit(listening.close)
        until(lambda: refuses_connections(listening.url))
        if patience > 1:
            RELEASED.set()
            assert running.result(60) == "slept"
        closing.result(60)
        assert isinstance(running.exception(60), OSError) == (patience < 1)


def refuses_connections(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False
