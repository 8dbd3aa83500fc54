"""The server that wakes a follower: its answers, and malformed requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from support.http_client import ask, raw_reply
from weightwire.chain import LARGEST_COMMIT
from weightwire.errors import CannotListen
from weightwire.follower import wakeups
from weightwire.follower.wakeups import WakeupServer
from weightwire.system import Access


class Woken:
    """The callbacks of the server."""

    def __init__(self) -> None:
        self.count = 0
        self.bodies: list[bytes] = []
        self.not_ready: list[str] = []

    def wake(self, body: bytes) -> None:
        self.count += 1
        self.bodies.append(body)

    def status(self) -> dict[str, Any]:
        return {"version": 4, "head": 5, "behind": 1, "trouble": ""}

    def metrics(self) -> bytes:
        return b"weightwire_version 4\n"

    def reasons(self) -> list[str]:
        return self.not_ready


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "_TIMEOUT", 60.0)  # this machine may be busy


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def server(woken: Woken) -> Iterator[WakeupServer]:
    with WakeupServer(
        "0", wake=woken.wake, status=woken.status, metrics=woken.metrics, reasons=woken.reasons
    ) as server:
        yield server


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def asked(server: WakeupServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    reply, body = ask(server.address, path, method)
    return reply.status, body


class TestAnswers:
    @pytest.mark.parametrize("path", ["/", "/wake", "/any/thing?x=1"])
    def test_a_post_wakes_the_follower(self, server: WakeupServer, woken: Woken, path: str) -> None:
        assert raw_reply(server.address, post(path, b'{"version": 4}')).startswith(b"HTTP/1.0 202 ")
        assert (woken.count, woken.bodies) == (1, [b'{"version": 4}'])

    def test_a_body_is_kept_up_to_the_size_of_a_commit(self, server: WakeupServer, woken: Woken) -> None:
        for size in (LARGEST_COMMIT, LARGEST_COMMIT + 1):
            assert raw_reply(server.address, post("/", b"x" * size)).startswith(b"HTTP/1.0 202 ")
        assert raw_reply(server.address, b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.0 202 ")
        assert list(map(len, woken.bodies)) == [LARGEST_COMMIT, 0, 0]

    @pytest.mark.parametrize("path", ["/", "/status", "/status?pretty"])
    def test_status_request_returns_the_status_as_json(self, server: WakeupServer, woken: Woken, path: str) -> None:
        code, body = asked(server, path)

        assert (code, json.loads(body)) == (200, woken.status())
        assert woken.count == 0

    def test_metrics_request_returns_the_metrics(self, server: WakeupServer, woken: Woken) -> None:
        assert asked(server, "/metrics") == (200, woken.metrics())

    def test_readiness_request_says_why_it_is_not_ready(self, server: WakeupServer, woken: Woken) -> None:
        assert [json.loads(asked(server, "/healthz")[1]), asked(server, "/healthz")[0]] == [{"alive": True}, 200]
        code, body = asked(server, "/readyz")
        assert (code, json.loads(body)) == (200, {"ready": True, "reasons": []})
        woken.not_ready = ["it serves no version"]
        code, body = asked(server, "/readyz?verbose")
        assert (code, json.loads(body)) == (503, {"ready": False, "reasons": ["it serves no version"]})
        assert asked(server, "/healthz")[0] == 200
        assert woken.count == 0

    def test_failing_readiness_check_is_not_ready(self, woken: Woken) -> None:
        def reasons() -> NoReturn:
            raise ZeroDivisionError

        with WakeupServer("0", wake=woken.wake, status=dict, metrics=bytes, reasons=reasons) as server:
            assert asked(server, "/readyz")[0] == 500

    def test_load_balancer_without_the_token_gets_no_reasons(self, woken: Woken) -> None:
        woken.not_ready = ["it serves no version"]
        options: dict[str, Any] = {"wake": woken.wake, "status": dict, "metrics": bytes, "reasons": woken.reasons}
        with WakeupServer("0", access=Access(token="a" * 32), **options) as server:
            reply, body = ask(server.address, "/readyz")
            assert (reply.status, json.loads(body)) == (503, {"ready": False})
            assert ask(server.address, "/healthz")[0].status == 200
            _, body = ask(server.address, "/readyz", Authorization="Bearer " + "a" * 32)
            assert json.loads(body)["reasons"] == woken.not_ready
            for method, path in (("POST", "/readyz"), ("GET", "/readyz/"), ("GET", "/status")):
                assert ask(server.address, path, method)[0].status == 401
        assert woken.count == 0

    @pytest.mark.parametrize("path", ["/healthz", "/readyz"])
    def test_load_balancers_must_name_this_machine(self, server: WakeupServer, path: str) -> None:
        request = f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode()
        assert raw_reply(server.address, request).startswith(b"HTTP/1.0 403 ")

    @pytest.mark.parametrize("hosts", [[], ["rollout-3.cluster"], ["localhost", "evil.example"]])
    def test_foreign_host_headers_are_refused(self, server: WakeupServer, woken: Woken, hosts: list[str]) -> None:
        head = "".join(f"Host: {host}\r\n" for host in hosts)
        assert raw_reply(server.address, f"POST / HTTP/1.1\r\n{head}\r\n".encode()).startswith(b"HTTP/1.0 403 ")
        assert woken.count == 0

    @pytest.mark.parametrize(("origin", "status"), [("http://evil.example", 403), ("null", 403), ("http://{}", 202)])
    def test_web_sites_cannot_wake_the_follower(
        self, server: WakeupServer, woken: Woken, origin: str, status: int
    ) -> None:
        reply, _ = ask(server.address, "/wake", "POST", Origin=origin.format(server.address))
        assert reply.status == status
        assert woken.count == (status == 202)

    def test_every_request_needs_the_token(self, woken: Woken) -> None:
        access = Access(token="a" * 32)
        with WakeupServer(
            "0.0.0.0:0", wake=woken.wake, status=woken.status, metrics=woken.metrics, access=access
        ) as server:
            for method, path in (("POST", "/wake"), ("GET", "/status"), ("GET", "/metrics")):
                assert ask(server.address, path, method)[0].status == 401
                assert ask(server.address, path, method, Authorization="Bearer " + "b" * 32)[0].status == 401
            assert woken.count == 0
            for method, path in (("POST", "/wake"), ("GET", "/status"), ("GET", "/metrics")):
                assert ask(server.address, path, method, Authorization="Bearer " + "a" * 32)[0].status in (200, 202)
        assert woken.count == 1

    def test_other_paths_are_not_found(self, server: WakeupServer) -> None:
        assert asked(server, "/../etc/passwd")[0] == 404
        assert asked(server, "/", "DELETE")[0] == 501


class TestMalformedRequests:
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
    def test_malformed_request_is_ignored(
        self, server: WakeupServer, woken: Woken, capfd: pytest.CaptureFixture[str], data: bytes
    ) -> None:
        raw_reply(server.address, data)

        assert asked(server, "/status")[0] == 200
        assert capfd.readouterr() == ("", "")

    def test_a_length_of_thousands_of_digits_is_answered(self, server: WakeupServer, woken: Woken) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"

        assert raw_reply(server.address, head).startswith(b"HTTP/1.0 202 ")
        assert woken.count == 1

    def test_only_part_of_a_large_body_is_read(self, server: WakeupServer, woken: Woken) -> None:
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n"

        assert raw_reply(server.address, head + b"x" * 50_000).startswith(b"HTTP/1.0 202 ")
        assert woken.count == 1

    def test_an_internal_error_shows_no_traceback(self, woken: Woken, capfd: pytest.CaptureFixture[str]) -> None:
        def status() -> NoReturn:
            raise ZeroDivisionError

        with WakeupServer("127.0.0.1:0", wake=woken.wake, status=status, metrics=woken.metrics) as server:
            assert raw_reply(server.address, b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(
                b"HTTP/1.0 500 "
            )
            assert asked(server, "/metrics")[0] == 200
        assert capfd.readouterr() == ("", "")


class TestAddress:
    def test_port_in_use_is_refused(self, server: WakeupServer, woken: Woken) -> None:
        with pytest.raises(CannotListen, match="the port is in use by another program") as caught:
            WakeupServer(server.address, wake=woken.wake, status=woken.status, metrics=woken.metrics)
        assert caught.value.hint == "choose another port, or 0 for any"

    @pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x" * 70 + ".example"])
    def test_address_of_another_host_is_refused(self, woken: Woken, host: str) -> None:
        with pytest.raises(CannotListen, match="cannot listen"):
            WakeupServer(
                f"{host}:0", wake=woken.wake, status=woken.status, metrics=woken.metrics, access=Access("a" * 32)
            )

    def test_address_beyond_this_machine_needs_a_token(self, woken: Woken) -> None:
        with pytest.raises(CannotListen, match="cannot listen beyond this machine without a token"):
            WakeupServer("0.0.0.0:0", wake=woken.wake, status=woken.status, metrics=woken.metrics)

    def test_address_is_free_after_close(self, server: WakeupServer, woken: Woken) -> None:
        server.close()

        with WakeupServer(server.address, wake=woken.wake, status=woken.status, metrics=woken.metrics) as again:
            assert again.address == server.address
            assert asked(again, "/")[0] == 200
