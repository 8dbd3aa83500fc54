"""A provocation: a function that makes weightwire raise one error, as a user would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightwire

__all__ = ["OTHER", "WEIGHTS", "Answer", "Case", "Provocation", "follow", "http_server", "publish"]

WEIGHTS: dict[str, Any] = {"w": np.arange(6, dtype=np.float32), "norm": np.ones(3, np.float16)}
OTHER: dict[str, Any] = {"w": np.ones(6, np.float32), "norm": np.ones(3, np.float16)}


@dataclass(frozen=True)
class Case:
    """An empty directory for the provocation, and a monkeypatch that is undone after it."""

    here: Path
    patch: pytest.MonkeyPatch

    @property
    def run(self) -> Path:
        return self.here / "run"

    def file(self, name: str, content: bytes | str) -> Path:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


Provocation = Callable[[Case], Any]
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


def publish(case: Case, *versions: Any, **settings: Any) -> Path:
    """A run in a directory with one version for each set of weights."""
    with weightwire.Publisher(case.run, blocking=True, threads=1, **settings) as publisher:
        for weights in versions or (WEIGHTS,):
            publisher.publish(weights)
    return case.run


def follow(case: Case, url: Any = None, **settings: Any) -> int:
    with weightwire.Follower(url or case.run, into=case.here / "replica", threads=1, **settings) as follower:
        return follower.once()


@contextmanager
def http_server(respond: Callable[[Any], Answer]) -> Iterator[str]:
    """A server that gives its own answer to every request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = respond(self)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = len(body) < int(headers.get("Content-Length", "0"))

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
