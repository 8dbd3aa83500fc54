"""A persistent connection to an inference server, and its errors."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from weightwire.errors import EngineError, EngineGone, public_url
from weightwire.system import Closeable

__all__ = ["QUICK", "NotOffered", "ServerConnection", "ServerRefusal", "ServerSoftware"]

QUICK = 30.0  # seconds, for calls that should be instant


@dataclass(frozen=True)
class ServerSoftware:
    """What a connection has to know about the software of its server."""

    name: str
    start: str  # how to start it for weightwire, for hints
    needs: str  # the oldest version, for errors
    version_path: str  # answers with its `version`
    alive_path: str  # answers at once
    key_variable: str = ""  # the environment variable of its API key, if it has one


class ServerRefusal(EngineError):
    """The server answered with an error."""


class NotOffered(EngineError):
    """The server does not have the endpoint."""


class ServerConnection(Closeable):
    """Kept open, because connecting takes as long as some of the calls."""

    def __init__(self, url: str, software: ServerSoftware) -> None:
        parts, port = _split(url)
        self._software = software
        self._url = public_url(url).rstrip("/")
        self.port = port or (443 if parts.scheme == "https" else 80)
        # URLs for OpenAI clients end in /v1, but the other endpoints are above it.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", port)
        self._last_seen = time.monotonic()
        self._is_closed = False

    def get(self, path: str, timeout: float = QUICK) -> dict[str, Any]:
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = QUICK) -> dict[str, Any]:
        return self._call("POST", path, body, timeout)

    def check_alive(self) -> None:
        """Raises EngineGone if the server has died. Call it while waiting for workers."""
        if time.monotonic() - self._last_seen > 1.0:
            self.get(self._software.alive_path)

    def close(self) -> None:
        """Closes for good and at once, also while another thread waits for an answer."""
        self._is_closed = True
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        for attempt in (1, 2):
            fresh = self._connection.sock is None
            try:
                status, answer = self._exchange(method, path, body, timeout)
                break
            except (OSError, http.client.HTTPException) as problem:
                self._connection.close()
                # The server closes idle connections, and then never saw the request: try once more.
                if fresh or attempt == 2 or not isinstance(problem, http.client.RemoteDisconnected | ConnectionError):
                    raise self._gone(problem, timeout) from problem
        self._last_seen = time.monotonic()
        if status == 503:
            raise EngineGone(f"{self._url}: is not ready ({_reason(answer, status)})", hint="wait until it has started")
        if status == 200:
            return answer
        if status == 404:
            raise NotOffered(
                f"{self._url}: does not offer {path.split('?')[0]} ({self._about()})", hint=self._software.start
            )
        if status == 401 and (variable := self._software.key_variable):
            raise EngineError(f"{self._url}: needs an API key", hint=f"set {variable} to the key of the server")
        raise ServerRefusal(f"{self._url}{path.split('?')[0]}: {_reason(answer, status)}", hint="see the server's log")

    def _gone(self, problem: Exception, timeout: float) -> EngineGone:
        if isinstance(problem, TimeoutError):
            hint = "it hangs, or is overloaded: see its log, and restart it if it stays so"
            return EngineGone(f"{self._url}: does not answer within {timeout:.2g} s", hint=hint)
        return EngineGone(
            f"{self._url}: cannot be reached ({problem or type(problem).__name__})",
            hint=f"start {self._software.name} there, or use the URL of a running server",
        )

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> tuple[int, dict[str, Any]]:
        if self._is_closed:  # another thread closed it while this one waited
            raise ConnectionError("the connection is closed")
        self._connection.timeout = timeout
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._software.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        self._connection.request(method, self._prefix + path, data, headers)
        response = self._connection.getresponse()
        raw = response.read()
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {"error": raw.decode(errors="replace")[:500]}
        return response.status, answer if isinstance(answer, dict) else {"error": str(answer)[:500]}

    def _about(self) -> str:
        """Describes a server that lacks an endpoint."""
        name = self._software.name
        try:
            status, answer = self._exchange("GET", self._software.version_path, None, QUICK)
        except (OSError, http.client.HTTPException):
            return f"is it {name}?"
        version = answer.get("version") if status == 200 else None
        if not isinstance(version, str):
            return f"is it {name}?"
        return f"it is {name} {version}; weightwire needs {self._software.needs}"


def _split(url: str) -> tuple[urllib.parse.SplitResult, int | None]:
    try:
        parts = urllib.parse.urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:  # unbalanced brackets or an invalid port
        parts, port, host = urllib.parse.urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or not host.isprintable() or " " in host:
        raise EngineError(
            f"{public_url(url.partition('?')[0])!r} is not the URL of a server",
            hint="use a URL such as http://127.0.0.1:8000",
        )
    return parts, port


def _reason(answer: dict[str, Any], status: int) -> str:
    error = answer.get("error") or answer.get("detail") or answer.get("message") or f"HTTP {status}"
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:500].removesuffix(".")
