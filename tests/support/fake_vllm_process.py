"""The process of `FakeVllm`: vLLM's endpoints and the answers of a weightwire worker, but without a model.

It imports nothing but the standard library, because it must start quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class _Worker:
    """The state of the server."""

    holding: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each model: its own, and a draft
    version: str = "default"
    is_paused: bool = False
    is_lost: bool = False  # its weights, by a sleep of level 2
    refusal: str = ""
    dies_at: str = ""  # an action
    orders: list[str] = field(default_factory=list)
    pauses: list[str] = field(default_factory=list)  # and what they do to the cache

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Any:
        match path:
            case "/health" | "/start_weight_update" | "/v1/models":
                return {}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/get_world_size":
                return {"world_size": 1}
            case "/is_sleeping" | "/is_paused":
                return {path[1:]: self.is_paused}
            case "/pause":
                self.is_paused = True
                self.pauses.append(f"clear_cache={query.get('clear_cache', ['true'])[0]}")
                return {}
            case "/resume" | "/wake_up":
                self.is_paused = False
                return {}
            case "/reset_prefix_cache":
                self.pauses.append(path)
                return {"success": True}
            case "/sleep":
                self.is_paused, self.is_lost = True, query["level"] == ["2"]
                self.version = "slept"  # as the plugin makes it
                return {}
            case "/init_weight_transfer_engine":
                self._reply(body["init_info"], True, self.refusal if body["init_info"]["model"] else "")
                return {}
            case "/update_weights":
                self._obey(body["update_info"])
                return {}
            case "/finish_weight_update":
                self.version = body.get("weight_version") or self.version
                return {}
            case "/update_weight_version":
                self.version = body["new_version"]
                return {}
            case "/test/refuse":
                self.refusal = body["problem"]
                return {}
            case "/test/die":
                self.dies_at = body["action"]
                return {}
            case "/test/orders":
                return self.orders
            case "/test/pauses":
                return self.pauses
        return None

    def _obey(self, order: dict[str, Any]) -> None:
        target = {name: order[name] for name in ("run", "version", "state")}
        model = order["model"]
        self.orders.append(f"{model} {order['action']} {target['version']}".strip())
        if order["action"] == self.dies_at:
            os._exit(1)
        if self.refusal:
            self._reply(order, False, self.refusal)
            return
        if order["action"] in ("swap", "reload"):
            self.holding[model], self.is_lost = target, False
        self._reply(order, order["action"] != "adopt" or (self.holding.get(model) == target and not self.is_lost))

    def _reply(self, order: dict[str, Any], done: bool, problem: str = "") -> None:
        """As `write_answer` in weightwire/engines/orders.py."""
        holding = self.holding.get(order["model"])
        answer = {"holding": holding, "done": done, "problem": problem, "hint": "serve the same model as the run"}
        directory = Path(order["directory"])
        partial = directory / f".{order['token']}.1"
        partial.write_text(json.dumps(answer))
        partial.replace(directory / f"{order['token']}.1.json")


def serve(port: int) -> None:
    worker = _Worker()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one write for each reply: otherwise TCP delays it

        def do_GET(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            found = worker.answer(parts.path, parse_qs(parts.query), json.loads(data or b"{}"))
            reply = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Followers that time out disconnect."""

    with contextlib.suppress(KeyboardInterrupt):
        Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the process that started it
    serve(int(sys.argv[1]))
