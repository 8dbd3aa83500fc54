"""What servers are asked by, and why an address cannot be had."""

from __future__ import annotations

import errno

import pytest

from weightwire.system.http_server import cannot_listen, name_in


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
        (UnicodeError("odd"), "h:80: cannot be listened on (odd)\nhint: check --host and --port"),
    ],
)
def test_what_is_wrong_with_an_address(problem: Exception, said: str) -> None:
    assert str(cannot_listen("h", 80, problem)).startswith(said)
    assert "--" not in str(cannot_listen("h", 80, problem, options=""))
