"""Where the server listens, and how it stops."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from stores import free_ports
from weightwire.errors import WeightwireError
from weightwire.server.listening import Listening


async def _sleep(request: Request) -> PlainTextResponse:
    await asyncio.sleep(float(request.path_params["seconds"]))
    return PlainTextResponse("slept")


APP = Starlette(routes=[Route("/sleep/{seconds}", _sleep)])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return str(reply.read().decode())


def test_any_port() -> None:
    with Listening(APP, "127.0.0.1", 0) as listening:
        assert get(f"{listening.url}/sleep/0") == "slept"
    with pytest.raises(urllib.error.URLError):
        get(f"{listening.url}/sleep/0")


def test_a_port_can_be_used_again_at_once() -> None:
    [port] = free_ports(1)
    for _ in range(2):
        with Listening(APP, "127.0.0.1", port) as listening:
            assert get(f"{listening.url}/sleep/0") == "slept"


def test_a_port_in_use() -> None:
    with Listening(APP, "127.0.0.1", 0) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(WeightwireError, match=f"127.0.0.1:{port}: another program listens there already"):
            Listening(APP, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "192.0.2.1"])
def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(WeightwireError, match="cannot be listened on"):
        Listening(APP, host, 0)


def test_what_is_being_answered_is_answered_and_what_takes_too_long_is_cut_off() -> None:
    listening = Listening(APP, "127.0.0.1", 0)
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
