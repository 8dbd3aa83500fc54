"""The door: what it answers, and that nothing which is sent to it does any harm."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from weightwire.errors import WeightwireError
from weightwire.follower.wakeups import WakeupServer, parse_address


class House:
    """Who is behind the door."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1

    def status(self) -> dict[str, Any]:
        return {"version": 4, "head": 5, "behind": 1, "trouble": ""}

    def metrics(self) -> bytes:
        return b"weightwire_version 4\n"


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def door(house: House) -> Iterator[WakeupServer]:
    with WakeupServer("0", wake=house.wake, status=house.status, metrics=house.metrics) as door:
        yield door


def ask(door: WakeupServer, path: str, data: bytes | None = None, method: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://{door.address}{path}", data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read()


def send(door: WakeupServer, data: bytes) -> bytes:
    host, _, port = door.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):  # it has heard enough
            pass
        return answer


class TestAnswers:
    @pytest.mark.parametrize("path", ["/", "/wake", "/any/thing?x=1"])
    def test_a_post_wakes(self, door: WakeupServer, house: House, path: str) -> None:
        assert ask(door, path, b'{"version": 4}')[0] == 202
        assert house.woken == 1

    @pytest.mark.parametrize("path", ["/", "/status", "/status?pretty"])
    def test_status(self, door: WakeupServer, house: House, path: str) -> None:
        code, body = ask(door, path)

        assert (code, json.loads(body)) == (200, house.status())
        assert house.woken == 0

    def test_metrics(self, door: WakeupServer, house: House) -> None:
        assert ask(door, "/metrics") == (200, house.metrics())

    def test_anything_else(self, door: WakeupServer) -> None:
        assert ask(door, "/../etc/passwd")[0] == 404
        assert ask(door, "/", method="DELETE")[0] == 501


class TestGarbage:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\0" * 1000,
            b"\xff\xfe\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\nshort",
        ],
    )
    def test_is_survived_in_silence(
        self, door: WakeupServer, house: House, capfd: pytest.CaptureFixture[str], data: bytes
    ) -> None:
        send(door, data)

        assert ask(door, "/status")[0] == 200
        assert capfd.readouterr() == ("", "")

    def test_of_a_body_only_some_is_read(self, door: WakeupServer, house: House) -> None:
        head = b"POST / HTTP/1.1\r\nContent-Length: 50000\r\n\r\n"

        assert send(door, head + b"x" * 50_000).startswith(b"HTTP/1.0 202 ")
        assert house.woken == 1

    def test_a_failure_inside_is_no_traceback(self, house: House, capfd: pytest.CaptureFixture[str]) -> None:
        def status() -> NoReturn:
            raise ZeroDivisionError

        with WakeupServer("127.0.0.1:0", wake=house.wake, status=status, metrics=house.metrics) as door:
            assert send(door, b"GET /status HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 500 ")
            assert ask(door, "/metrics")[0] == 200
        assert capfd.readouterr() == ("", "")


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("8000", "127.0.0.1", 8000),
            (":8000", "127.0.0.1", 8000),
            ("0.0.0.0:80", "0.0.0.0", 80),
            ("gpu-7.internal:9", "gpu-7.internal", 9),
            ("[::1]:8000", "::1", 8000),
        ],
    )
    def test_is(self, text: str, host: str, port: int) -> None:
        assert parse_address(text) == (host, port)

    @pytest.mark.parametrize(
        "text", ["", "host", "host:", "1:2:3", "::1:80", "-1", "65536", "http://h:1", "h:1/x", "h :1"]
    )
    def test_is_none(self, text: str) -> None:
        with pytest.raises(WeightwireError, match="is no address to listen on") as caught:
            parse_address(text)
        assert "HOST:PORT" in (caught.value.hint or "")

    def test_of_a_port_that_is_taken(self, door: WakeupServer, house: House) -> None:
        with pytest.raises(WeightwireError, match="another program listens there already") as caught:
            WakeupServer(door.address, wake=house.wake, status=house.status, metrics=house.metrics)
        assert caught.value.hint == "choose another port, or 0 for any"

    @pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x" * 70 + ".example"])
    def test_of_a_host_that_is_not_this_one(self, house: House, host: str) -> None:
        with pytest.raises(WeightwireError, match="cannot be listened on"):
            WakeupServer(f"{host}:0", wake=house.wake, status=house.status, metrics=house.metrics)

    def test_is_free_again_after_it_was_closed(self, door: WakeupServer, house: House) -> None:
        door.close()

        with WakeupServer(door.address, wake=house.wake, status=house.status, metrics=house.metrics) as again:
            assert again.address == door.address
            assert ask(again, "/")[0] == 200
