"""A connection to a vLLM server, kept open; and what its answers mean when something is wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from typing import Any

from weightwire.errors import EngineError, EngineGone
from weightwire.system import Closeable

__all__ = ["QUICK", "START", "VllmConnection", "VllmRefusal", "public_url"]

START = 'start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "weightwire"}\''
QUICK = 30.0  # seconds for what should take none
_OLDEST = "0.29"


class VllmRefusal(EngineError):
    """The server is there, and says no."""


class VllmConnection(Closeable):
    """One connection, kept open: to open one takes as long as some of the calls."""

    def __init__(self, url: str) -> None:
        parts, port = _split(url)
        self._url = public_url(url)
        self.port = port or (443 if parts.scheme == "https" else 80)
        # Clients of OpenAI's interface end it in /v1, where the rest is not.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", port)
        self._last_seen = time.monotonic()

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None, QUICK)

    def post(self, path: str, body: dict[str, Any], timeout: float = QUICK) -> dict[str, Any]:
        return self._call("POST", path, body, timeout)

    def check_alive(self) -> None:
        """While its workers are awaited: one that has died will never answer."""
        if time.monotonic() - self._last_seen > 1.0:
            self.get("/weight_info")

    def close(self) -> None:
        """At once, also for a thread that waits for an answer."""
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
                # A connection that was idle for long has been closed by the server, which then never saw this.
                if fresh or attempt == 2 or not isinstance(problem, http.client.RemoteDisconnected | ConnectionError):
                    raise EngineGone(
                        f"{self._url}: cannot be reached ({problem or type(problem).__name__})",
                        hint="start vLLM there, or give the URL of one that runs",
                    ) from problem
        self._last_seen = time.monotonic()
        if status == 200:
            return answer
        if status == 404:
            raise EngineError(f"{self._url}: has no {path.split('?')[0]} ({self._about()})", hint=START)
        raise VllmRefusal(f"{self._url}{path.split('?')[0]}: {_reason(answer, status)}", hint="see the server's log")

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> tuple[int, dict[str, Any]]:
        self._connection.timeout = timeout
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)
        data = None if body is None else json.dumps(body)
        self._connection.request(method, self._prefix + path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        raw = response.read()
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {"error": raw.decode(errors="replace")[:500]}
        return response.status, answer if isinstance(answer, dict) else {"error": str(answer)[:500]}

    def _about(self) -> str:
        """Which vLLM it is, for one that lacks what we need."""
        try:
            status, answer = self._exchange("GET", "/version", None, QUICK)
        except (OSError, http.client.HTTPException):
            return "is it vLLM?"
        version = answer.get("version") if status == 200 else None
        if not isinstance(version, str):
            return "is it vLLM?"
        return f"vLLM {version}, {_OLDEST} or newer is needed, in developer mode"


def public_url(url: str) -> str:
    """Without a password, and without a query, which may hold a token."""
    before, _, host = url.partition("?")[0].partition("#")[0].rstrip("/").rpartition("@")
    return f"{before.partition('://')[0]}://{host}" if before else host


def _split(url: str) -> tuple[urllib.parse.SplitResult, int | None]:
    try:
        parts = urllib.parse.urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:  # brackets without an end, or a port that is none
        parts, port, host = urllib.parse.urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or not host.isprintable() or " " in host:
        raise EngineError(f"{public_url(url)!r} is not the URL of a server", hint="write it as http://127.0.0.1:8000")
    return parts, port


def _reason(answer: dict[str, Any], status: int) -> str:
    error = answer.get("error") or answer.get("detail") or f"HTTP {status}"
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:500]
