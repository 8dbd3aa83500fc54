"""The small HTTP server: its replies, its limits and the addresses of every server."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from support.followers import until
from support.http_client import ask, raw_reply
from weightwire.errors import CannotListen
from weightwire.system import http_server
from weightwire.system.access import Access
from weightwire.system.http_server import (
    HttpReply,
    HttpRequest,
    HttpServer,
    cannot_listen,
    format_address,
    parse_address,
    resolve,
)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            OSError(errno.EADDRINUSE, "x"),
            "h:80: the port is in use by another program\nhint: choose another --port, or 0",
        ),
        (OSError(errno.EACCES, "no"), "h:80: cannot listen (no)\nhint: choose a port from 1024 on"),
        (OSError(errno.EINVAL, "odd"), "h:80: cannot listen (odd)\nhint: check --host and --port"),
    ],
)
def test_error_names_the_address_and_the_reason(problem: OSError, message: str) -> None:
    assert str(cannot_listen("h", 80, problem)).startswith(message)
    assert "--" not in str(cannot_listen("h", 80, problem, options=""))


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("x" * 70 + ".example", 80)])
def test_invalid_address_is_an_os_error(host: str, port: int) -> None:
    with pytest.raises(OSError, match=r"0 to 65535|idna") as caught:
        resolve(host, port)
    assert caught.value.errno == errno.EINVAL


def test_ipv6_address_is_in_brackets() -> None:
    assert (format_address("::1", 80), format_address("box", 80)) == ("[::1]:80", "box:80")


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
def test_listen_address_is_a_port_or_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "1:2:3", "::1:80", "-1", "65536", "http://h:1", "h:1/x", "h :1"])
def test_other_text_is_not_an_address(text: str) -> None:
    with pytest.raises(CannotListen, match="is not an address to listen on") as caught:
        parse_address(text)
    assert "HOST:PORT" in (caught.value.hint or "")


def echo(request: HttpRequest) -> HttpReply:
    return HttpReply(200, "text/plain", f"{request.method} {request.path}".encode(), {"X-Own": "reply"})


@contextmanager
def serving(
    answer: Callable[[HttpRequest], HttpReply] = echo, ports: Iterable[int] = (0,), **settings: Any
) -> Iterator[HttpServer]:
    options: dict[str, Any] = {"name": "test", "methods": ("GET", "HEAD", "POST"), "timeout": 60.0, "host": "127.0.0.1"}
    with HttpServer(ports=ports, answer=answer, **(options | settings)) as server:
        server.start()
        yield server


class TestServer:
    def test_server_answers_without_the_query(self) -> None:
        with serving(headers={"X-Every": "reply"}) as server:
            reply, body = ask(server.address, "/a/b?c=d")
        assert (reply.status, body) == (200, b"GET /a/b")
        assert (reply.getheader("X-Own"), reply.getheader("X-Every")) == ("reply", "reply")

    def test_head_has_a_length_but_no_body(self) -> None:
        with serving() as server:
            reply = raw_reply(server.address, b"HEAD /a HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert reply.startswith(b"HTTP/1.0 200 ")
        assert b"\r\nContent-Length: 7\r\n" in reply
        assert reply.endswith(b"\r\n\r\n")

    def test_not_modified_has_no_body_and_no_length(self) -> None:
        with serving(lambda request: HttpReply(304, "text/plain", b"unseen")) as server:
            reply = raw_reply(server.address, b"GET /a HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert reply.startswith(b"HTTP/1.0 304 ")
        assert b"Content-Length" not in reply
        assert reply.endswith(b"\r\n\r\n")

    @pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE"])
    def test_other_methods_are_not_supported(self, method: str) -> None:
        with serving(methods=("GET",)) as server:
            assert ask(server.address, "/a", method)[0].status == 501

    def test_failed_answer_is_a_500(self, capfd: pytest.CaptureFixture[str]) -> None:
        def fail(request: HttpRequest) -> HttpReply:
            raise ZeroDivisionError

        with serving(fail) as server:
            assert ask(server.address, "/a")[0].status == 500
        assert capfd.readouterr() == ("", "")

    def test_foreign_hosts_are_rejected(self) -> None:
        with serving() as server:
            assert ask(server.address, "/a", Host="evil.example")[0].status == 403
            assert ask(server.address, "/a", Host="localhost:1")[0].status == 200

    def test_public_server_accepts_any_host(self) -> None:
        with serving(host="0.0.0.0", access=Access(insecure=True)) as server:
            assert ask(server.address, "/a", Host="box.example")[0].status == 200

    def test_public_server_needs_a_token(self) -> None:
        with pytest.raises(CannotListen, match=r"0\.0\.0\.0: cannot listen beyond this machine without a token"):
            HttpServer("0.0.0.0", [0], echo, name="test", methods=("GET",), timeout=1.0)

    def test_reply_without_the_token_names_the_scheme(self) -> None:
        for browser, scheme in ((False, "Bearer"), (True, "Basic")):
            with serving(access=Access("t" * 32), browser=browser) as server:
                reply, body = ask(server.address, "/a")
                assert (reply.status, body) == (401, b"a token is required\n")
                assert reply.getheader("WWW-Authenticate") == f'{scheme} realm="weightwire"'
                assert ask(server.address, "/a", Authorization="Bearer " + "t" * 32)[0].status == 200

    def test_silent_client_is_disconnected(self) -> None:
        with serving(timeout=0.05) as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                assert connection.recv(1) == b""

    def test_client_that_sends_a_byte_now_and_then_is_disconnected(self) -> None:
        with serving(timeout=0.3) as server:
            host, _, port = server.address.rpartition(":")
            began = time.monotonic()
            with socket.create_connection((host, int(port)), timeout=0.05) as connection:
                with suppress(BrokenPipeError, ConnectionResetError):
                    while time.monotonic() - began < 60:
                        connection.sendall(b"G")
                        with suppress(TimeoutError):
                            if connection.recv(1) == b"":
                                break
                assert 0.2 < time.monotonic() - began < 60

    def test_slow_body_does_not_hold_the_reply_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        end_head = http_server._RequestStream.end_head

        def end_time(stream: Any) -> None:
            """The head took nearly all of the time."""
            end_head(stream)
            stream._until = time.monotonic() + 0.1

        monkeypatch.setattr(http_server._RequestStream, "end_head", end_time)
        with serving() as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(b"POST /a HTTP/1.0\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n")
                assert connection.recv(12) == b"HTTP/1.0 200"

    @pytest.mark.parametrize("head", [b"GET /" + b"a" * 40_000, b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 8_000])
    def test_large_head_is_refused(self, head: bytes) -> None:
        with serving() as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(head[: 1 << 15])  # not more, or a reset could overtake the reply
                    connection.sendall(b"\r")
                assert b" 431 " in connection.recv(100)

    def test_connections_are_limited(self) -> None:
        """The others are closed at once, not after the server's timeout, which is longer than the client's."""

        def answers() -> bool:
            with suppress(OSError):
                return ask(server.address, "/a")[0].status == 200
            return False

        with serving(timeout=600.0) as server:
            host, _, port = server.address.rpartition(":")
            with ExitStack() as stack:
                many = [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(80)]
                assert [one.recv(1) for one in many[64:]] == [b""] * 16
                assert not answers()
                many[0].sendall(b"GET /a HTTP/1.0\r\nHost: localhost\r\n\r\n")
                assert many[0].recv(12) == b"HTTP/1.0 200"
            until(answers)

    def test_body_is_read_before_the_reply(self) -> None:
        """If the connection closed before, the client would see an error instead of the reply."""
        with serving() as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=0.2) as connection:
                connection.sendall(b"POST /a HTTP/1.0\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(60)
                connection.sendall(b"hello")
                assert connection.recv(12) == b"HTTP/1.0 200"

    def test_server_uses_the_first_free_port(self) -> None:
        with serving() as first, serving(ports=[first.port, 0]) as second:
            assert second.port not in (0, first.port)
            assert second.address == f"127.0.0.1:{second.port}"

    def test_server_fails_if_no_port_is_free(self) -> None:
        with (
            serving() as first,
            pytest.raises(CannotListen, match="the port is in use by another program"),
            serving(ports=[first.port, first.port]),
        ):
            pass

    def test_server_listens_on_ipv6(self) -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        with serving(host="::1") as server:
            assert server.address == f"[::1]:{server.port}"
            assert ask(server.address, "/a")[0].status == 200

    def test_server_can_be_closed_before_it_is_started(self) -> None:
        server = HttpServer("127.0.0.1", [0], echo, name="test", methods=("GET",), timeout=1.0)
        server.close()
        with serving(ports=[server.port]) as again:
            assert again.port == server.port
