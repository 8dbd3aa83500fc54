"""Which requests a server accepts. One rule for everything that listens:

- With a token, every request must carry it: `Authorization: Bearer TOKEN`.
- Without a token, the server listens on this machine only. A request must name this machine in its Host header, and
  must not come from another web site (Origin).
- `insecure` opens a server to everyone who can reach it. Use it only behind a proxy that checks requests.

Tokens come from a file or from WEIGHTWIRE_TOKEN, never from a command line, which other users can see.
"""

from __future__ import annotations

import binascii
import os
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path

from weightwire.errors import CannotListen

__all__ = ["TOKEN_VARIABLE", "Access", "Guard", "Turned", "is_local_request", "is_loopback", "name_in", "read_token"]

TOKEN_VARIABLE = "WEIGHTWIRE_TOKEN"

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+))(?::[0-9]*)?")  # a name, optionally a port
_TOKEN = re.compile(r"[!-~]{16,1024}")
_TOKENS = "a token has 16 to 1024 ASCII characters and no spaces: make one with `openssl rand -hex 32`"
_LONGEST = 4096  # bytes that are read of a token file


def name_in(host: str) -> str:
    """The name in a Host header, without the port. Empty if the header is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:  # not an IP address
        return False


def is_local_request(hosts: Sequence[str], host: str) -> bool:
    """Whether a request names this machine, or the `host` that the server was started with.

    `hosts` are its Host headers. Exactly one is allowed: with several, a proxy and the server could check different
    ones. A server on a loopback address must reject other names, or the scripts of a web site whose DNS name points to
    127.0.0.1 can read its replies.
    """
    name = name_in(hosts[0]) if len(hosts) == 1 else ""
    return bool(name) and (name in ("localhost", host.lower()) or is_loopback(name))


def read_token(file: Path | None = None, variables: Mapping[str, str] = os.environ) -> str | None:
    """The token in a file, or in WEIGHTWIRE_TOKEN. None if neither is given. No error repeats a token."""
    if file is None:
        text, where = variables.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    else:
        try:
            with file.open("rb") as opened:
                text, where = opened.read(_LONGEST).decode("ascii", "replace"), str(file)
        except OSError as problem:
            raise CannotListen(
                f"{file}: cannot read the token ({problem.strerror})", hint="check the path and its permissions"
            ) from problem
    token = text.strip()
    if not token and file is None:
        return None
    if not _TOKEN.fullmatch(token):
        raise CannotListen(f"{where}: not a valid token", hint=_TOKENS)
    return token


@dataclass(frozen=True)
class Access:
    """Who may use a server. The default is this machine, without a token."""

    token: str | None = field(default=None, repr=False)
    insecure: bool = False  # listen beyond this machine without a token


@dataclass(frozen=True)
class Turned:
    """Why a request was turned away."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Guard:
    """Checks the requests to one server.

    - `host`: as the server was told. `place`: the address that it resolved to.
    - `browser`: also accept the token as the password of HTTP's Basic scheme, which browsers ask their user for. Only
      for servers that change nothing: browsers also send it with requests that other web sites make.
    """

    def __init__(self, access: Access, host: str, place: str, *, browser: bool = False) -> None:
        self._is_local = is_loopback(place)
        if not self._is_local and access.token is None and not access.insecure:
            raise CannotListen(
                f"{host}: cannot listen beyond this machine without a token",
                hint=f"set {TOKEN_VARIABLE} or --token-file, or listen on 127.0.0.1; --insecure admits everyone",
            )
        self._token = None if access.token is None else _digest(access.token.encode())
        self._host = host
        self._browser = browser

    def turned(self, values: Callable[[str], Sequence[str]]) -> Turned | None:
        """Why a request is not accepted, or None. `values` returns the values of a header."""
        if self._token is not None:
            if self._has_token(values("Authorization")):
                return None
            scheme = 'Basic realm="weightwire"' if self._browser else 'Bearer realm="weightwire"'
            return Turned(401, "a token is required", {"WWW-Authenticate": scheme})
        if not self._is_local:
            return None
        hosts = values("Host")
        if not is_local_request(hosts, self._host):
            return Turned(403, "this server accepts local requests only: use 127.0.0.1 or localhost as host")
        if any(origin.lower().partition("://")[2] != hosts[0].lower() for origin in values("Origin")):
            return Turned(403, "this server does not accept requests from other web sites")
        return None

    def _has_token(self, values: Sequence[str]) -> bool:
        scheme, _, given = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() == "bearer":
            return self._is_token(given.strip().encode("utf-8", "replace"))
        return self._browser and scheme.lower() == "basic" and self._is_token(_password(given))

    def _is_token(self, given: bytes) -> bool:
        # Digests have equal lengths, so the time tells nothing about the token.
        return self._token is not None and compare_digest(_digest(given), self._token)


def _digest(text: bytes) -> bytes:
    return sha256(text).digest()


def _password(credentials: str) -> bytes:
    """The password of Basic credentials: base64 of USER:PASSWORD. The user does not matter."""
    try:
        return b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
