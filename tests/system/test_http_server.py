"""The small HTTP server, and the rules for any: Host headers, and addresses that are taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.http_client import ask, raw_reply
from weightwire.errors import CannotListen
from weightwire.system.http_server import (
    HttpReply,
    HttpRequest,
    HttpServer,
    cannot_listen,
    format_address,
    is_local_request,
    name_in,
    parse_address,
    resolve,
)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("127.0.0.1:", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]evil", ""),
        ("localhost:evil", ""),
        ("localhost:\u0661", ""),
        ("::1", ""),
        ("", ""),
    ],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert name_in(host) == name


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            OSError(errno.EADDRINUSE, "x"),
            "h:80: another program listens there already\nhint: choose another --port, or 0",
        ),
        (OSError(errno.EACCES, "no"), "h:80: cannot be listened on (no)\nhint: ports below 1024 are for root"),
        (OSError(errno.EINVAL, "odd"), "h:80: cannot be listened on (odd)\nhint: check --host and --port"),
    ],
)
def test_what_is_wrong_with_an_address(problem: OSError, said: str) -> None:
    assert str(cannot_listen("h", 80, problem)).startswith(said)
    assert "--" not in str(cannot_listen("h", 80, problem, options=""))


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("x" * 70 + ".example", 80)])
def test_an_address_that_cannot_exist_is_an_os_error(host: str, port: int) -> None:
    with pytest.raises(OSError, match=r"0 to 65535|idna") as caught:
        resolve(host, port)
    assert caught.value.errno == errno.EINVAL


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert (format_address("::1", 80), format_address("box", 80)) == ("[::1]:80", "box:80")


@pytest.mark.parametrize("header", ["localhost", "127.0.0.1:80", "127.8.9.1", "[::1]:80", "BOX.example:80"])
def test_a_local_request_names_this_machine(header: str) -> None:
    assert is_local_request([header], "box.example")


@pytest.mark.parametrize("header", ["", "evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::1]evil"])
def test_any_other_name_is_foreign(header: str) -> None:
    assert not is_local_request([header], "box.example")


@pytest.mark.parametrize("headers", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_a_request_without_exactly_one_host_is_foreign(headers: list[str]) -> None:
    assert not is_local_request(headers, "box.example")


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
def test_an_address_to_listen_on_is_a_port_or_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "1:2:3", "::1:80", "-1", "65536", "http://h:1", "h:1/x", "h :1"])
def test_any_other_text_is_not_an_address(text: str) -> None:
    with pytest.raises(CannotListen, match="is no address to listen on") as caught:
        parse_address(text)
    assert "HOST:PORT" in (caught.value.hint or "")


def echo(request: HttpRequest) -> HttpReply:
    return HttpReply(200, "text/plain", f"{request.method} {request.path}".encode(), {"X-Own": "reply"})


@contextmanager
def serving(
    answer: Callable[[HttpRequest], HttpReply] = echo, ports: Iterable[int] = (0,), **settings: Any
) -> Iterator[HttpServer]:
    options: dict[str, Any] = {"name": "test", "methods": ("GET", "HEAD", "POST"), "timeout": 10.0, "host": "127.0.0.1"}
    with HttpServer(ports=ports, answer=answer, **(options | settings)) as server:
        server.start()
        yield server


class TestServer:
    def test_answers_without_the_query(self) -> None:
        with serving(headers={"X-Every": "reply"}) as server:
            reply, body = ask(server.address, "/a/b?c=d")
        assert (reply.status, body) == (200, b"GET /a/b")
        assert (reply.getheader("X-Own"), reply.getheader("X-Every")) == ("reply", "reply")

    def test_head_has_a_length_but_no_body(self) -> None:
        with serving() as server:
            reply = raw_reply(server.address, b"HEAD /a HTTP/1.0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.0 200 ")
        assert b"\r\nContent-Length: 7\r\n" in reply
        assert reply.endswith(b"\r\n\r\n")

    def test_not_modified_has_no_body_and_no_length(self) -> None:
        with serving(lambda request: HttpReply(304, "text/plain", b"unseen")) as server:
            reply = raw_reply(server.address, b"GET /a HTTP/1.0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.0 304 ")
        assert b"Content-Length" not in reply
        assert reply.endswith(b"\r\n\r\n")

    @pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE"])
    def test_other_methods_are_not_supported(self, method: str) -> None:
        with serving(methods=("GET",)) as server:
            assert ask(server.address, "/a", method)[0].status == 501

    def test_an_answer_that_fails_is_an_error_500(self, capfd: pytest.CaptureFixture[str]) -> None:
        def fail(request: HttpRequest) -> HttpReply:
            raise ZeroDivisionError

        with serving(fail) as server:
            assert ask(server.address, "/a")[0].status == 500
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize(("check_host", "status"), [(True, 403), (False, 200)])
    def test_foreign_hosts_are_rejected_where_asked_for(self, check_host: bool, status: int) -> None:
        with serving(check_host=check_host) as server:
            assert ask(server.address, "/a", Host="evil.example")[0].status == status
            assert ask(server.address, "/a", Host="localhost:1")[0].status == 200

    def test_any_host_may_be_named_where_others_can_connect(self) -> None:
        with serving(host="0.0.0.0", check_host=True) as server:
            assert ask(server.address, "/a", Host="box.example")[0].status == 200

    def test_a_silent_client_is_disconnected(self) -> None:
        with serving(timeout=0.05) as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                assert connection.recv(1) == b""

    def test_a_body_is_read_before_the_reply(self) -> None:
        """A server that closes the connection before that makes its reply an error at the other end."""
        with serving() as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=0.2) as connection:
                connection.sendall(b"POST /a HTTP/1.0\r\nContent-Length: 5\r\n\r\n")
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(10)
                connection.sendall(b"hello")
                assert connection.recv(12) == b"HTTP/1.0 200"

    def test_takes_the_first_free_port(self) -> None:
        with serving() as first, serving(ports=[first.port, 0]) as second:
            assert second.port not in (0, first.port)
            assert second.address == f"127.0.0.1:{second.port}"

    def test_fails_if_no_port_is_free(self) -> None:
        with (
            serving() as first,
            pytest.raises(CannotListen, match="another program listens there already"),
            serving(ports=[first.port, first.port]),
        ):
            pass

    def test_listens_on_ipv6(self) -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        with serving(host="::1", check_host=True) as server:
            assert server.address == f"[::1]:{server.port}"
            assert ask(server.address, "/a")[0].status == 200

    def test_can_be_closed_before_it_is_started(self) -> None:
        server = HttpServer("127.0.0.1", [0], echo, name="test", methods=("GET",), timeout=1.0)
        server.close()
        with serving(ports=[server.port]) as again:
            assert again.port == server.port
