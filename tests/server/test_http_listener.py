"""Where the server listens, and how it stops."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.stores import free_ports
from weightwire.errors import CannotListen
from weightwire.server.http_listener import HttpListener


async def _sleep(request: Request) -> PlainTextResponse:
    await asyncio.sleep(float(request.path_params["seconds"]))
    return PlainTextResponse("slept")


APP = Starlette(routes=[Route("/sleep/{seconds}", _sleep)])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return str(reply.read().decode())


def test_port_0_takes_any_free_port() -> None:
    with HttpListener(APP, "127.0.0.1", 0) as listening:
        assert get(f"{listening.url}/sleep/0") == "slept"
    with pytest.raises(urllib.error.URLError):
        get(f"{listening.url}/sleep/0")


def test_a_port_can_be_used_again_at_once() -> None:
    [port] = free_ports(1)
    for _ in range(2):
        with HttpListener(APP, "127.0.0.1", port) as listening:
            assert get(f"{listening.url}/sleep/0") == "slept"


def test_a_port_in_use_is_an_error() -> None:
    with HttpListener(APP, "127.0.0.1", 0) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: another program listens there already"):
            HttpListener(APP, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "192.0.2.1"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(CannotListen, match="cannot be listened on"):
        HttpListener(APP, host, 0)


def status(url: str, *headers: str) -> int:
    """Of an answer to a request with just these headers."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=20) as connection:
        connection.sendall("\r\n".join(["GET /sleep/0 HTTP/1.1", *headers, "Connection: close", "", ""]).encode())
        return int(connection.makefile().readline().split()[1])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HttpListener(APP, "127.0.0.1", 0) as listening:
        yield listening.url


class TestNames:
    @pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LocalHost", "[::1]", "127.0.0.2"])
    def test_of_this_machine_are_served_with_any_port_or_none(self, url: str, name: str) -> None:
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
    def test_of_others_are_refused(self, url: str, name: str) -> None:
        assert status(url, f"Host: {name}") == 403

    def test_a_missing_or_repeated_host_is_refused(self, url: str) -> None:
        assert status(url) in (400, 403)
        assert status(url, "Host: localhost", "Host: evil.example") in (400, 403)

    def test_the_one_it_was_started_with_is_served(self) -> None:
        with HttpListener(APP, "LOCALHOST", 0) as listening:
            assert status(listening.url, "Host: localhost:80") == 200
            assert status(listening.url, "Host: evil.example") == 403

    def test_any_name_is_served_where_it_listens_to_others(self) -> None:
        with HttpListener(APP, "0.0.0.0", 0) as listening:
            assert status(listening.url, "Host: rollout-3.cluster:8000") == 200


def test_what_is_being_answered_is_answered_and_what_takes_too_long_is_cut_off() -> None:
    listening = HttpListener(APP, "127.0.0.1", 0)
    told: dict[str, str] = {}

    def ask(seconds: str) -> None:
        try:
            told[seconds] = get(f"{listening.url}/sleep/{seconds}")
        except (OSError, urllib.error.URLError) as problem:
            told[seconds] = type(problem).__name__

    threads = [threading.Thread(target=ask, args=(seconds,)) for seconds in ("0.7", "30")]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    listening.close()
    assert 0.2 < time.monotonic() - began < 5
    for thread in threads:
        thread.join()
    assert told["0.7"] == "slept"
    assert told["30"] != "slept"
