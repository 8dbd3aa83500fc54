"""A server that behaves as SGLang does to a follower, with real modules as its workers.

It accepts what the request classes of one version accept, by the table that was read from SGLang's wheels. It notes
what would harm a real server in `violations`: an update that is not paused, old cache with new weights, and so on.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from support.fused_model import contents
from support.sglang_model import SglangModel

TABLE = json.loads((Path(__file__).parent.parent / "engines/sglang/request_table.json").read_text())
LOADER = "weightwire.engines.sglang.load"
_DEFAULT = " = default"


def complaint(version: str, path: str, body: dict[str, Any]) -> str:
    """Why this version of SGLang would reject a request, or an empty string."""
    facts = TABLE[version]
    if path not in facts["endpoints"]:
        return f"{path}: not offered"
    fields = facts["requests"].get(facts["endpoints"][path], {})
    for name, kind in fields.items():
        if name not in body and not kind.endswith(_DEFAULT):
            return f"{path}: {name} is missing"
    for name, value in body.items():
        if name not in fields or not _fits(fields[name].removesuffix(_DEFAULT), value):
            return f"{path}: {name}={value!r} does not fit {fields.get(name)}"
    return ""


def _fits(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value)
    if kind.startswith("Literal["):
        return value in ast.literal_eval(kind.removeprefix("Literal"))
    if kind in ("List[Union[str, bytes]]", "Annotated[List[bytes], Base64Bytes()]"):
        return isinstance(value, list) and all(base64.b64decode(one, validate=True) for one in value)
    return {"str": str, "bool": bool, "int": int}.get(kind) is type(value)


class _HarmlessUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("torch", "ByteTensor")
        return super().find_class(module, name)


class FakeSglang:
    """Serves from construction until `die` or `close`. `start` starts it again, with the weights of its start."""

    def __init__(self, version: str = "0.5.23", ranks: int = 1, prepare: Callable[[Any], Any] = lambda model: None):
        self.version, self.ranks, self._prepare = version, ranks, prepare
        self.settings: dict[str, Any] = {"tp_size": ranks, "custom_weight_loader": [LOADER], "quantization": None}
        self.violations: list[str] = []
        self.calls: list[str] = []
        self.before: Callable[[str, dict[str, Any]], Any] = lambda path, body: None  # a hook, which may raise
        self._server: ThreadingHTTPServer | None = None
        self.start()

    def start(self) -> None:
        self.models: list[Any] = [SglangModel(rank, self.ranks) for rank in range(self.ranks)]
        for model in self.models:
            self._prepare(model)
        self.weight_version, self.model_path = "default", "started/from"
        self.is_paused = self.is_open = self.is_stale = self.is_dead = False
        self.running = self.waiting = self.aborted = 0
        port = self._server.server_address[1] if self._server else 0
        self._server = _server(self, port)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def die(self) -> None:
        """Closes its socket: whoever waits for a reply gets none."""
        assert self._server is not None
        self.is_dead = True
        self._server.shutdown()
        self._server.server_close()

    @property
    def weights(self) -> list[dict[str, bytes]]:
        return [contents(model) for model in self.models]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.is_dead:
            raise ConnectionError("dead")
        self.calls.append(path)
        if path not in TABLE[self.version]["endpoints"]:
            return 404, {"detail": "Not Found"}
        if problem := complaint(self.version, path, body):
            self.violations.append(problem)
            return 422, {"detail": problem}
        self.before(path, body)
        before = self.weights
        status, message = getattr(self, "_" + path[1:])(body)
        self.is_stale |= self.weights != before
        if self.is_stale and not self.is_paused:
            self.violations.append(f"{path}: old cache with new weights")
        return status, message if isinstance(message, dict) else {"success": status == 200, "message": message}

    # --- endpoints -----------------------------------------------------------------------------------------------

    def _model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.weight_version, "model_path": self.model_path}

    def _server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"version": self.version, "internal_states": [{}], **self.settings}

    def _pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.is_paused = True
        if body["mode"] != "in_place":
            self.waiting, self.running = self.waiting + self.running, 0
        if body["mode"] == "abort":
            self.aborted, self.waiting = self.aborted + self.waiting, 0
        return 200, "ok"

    def _continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.is_open:
            self.violations.append("an update is still open")
        self.is_paused = False
        self.running, self.waiting = self.running + self.waiting, 0
        return 200, "ok"

    def _flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.running or (self.waiting and not self._has_sessions):
            return 400, "Flush cache failed."
        self.is_stale = False
        return 200, "Cache flushed."

    @property
    def _has_sessions(self) -> bool:
        return "/begin_weight_update" in TABLE[self.version]["endpoints"]

    def _begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.is_open:
            return 400, "a weight-update session is already open"
        self.is_open = True
        return 200, "Success"

    def _end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        was_open, self.is_open = self.is_open, False
        return (200, "Success") if was_open else (400, "no weight-update session is open")

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.is_paused:
            self.violations.append("an update waits for the end of all requests")
        if self._has_sessions and not self.is_open:
            return 400, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        module, _, name = body["load_format"].rpartition(".")
        if body["load_format"] not in self.settings["custom_weight_loader"]:
            return 500, "Unknown load_format"
        for rank, model in enumerate(self.models):
            data = base64.b64decode(body["serialized_named_tensors"][rank])
            with torch.inference_mode():
                getattr(import_module(module), name)(model, _HarmlessUnpickler(io.BytesIO(data)).load())
        return 200, "Success"

    def _update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.model_path = body["model_path"]  # before loading, as SGLang
        try:
            for model in self.models:
                model.load_weights(load_file(Path(self.model_path) / "model.safetensors").items())
        except Exception as problem:
            return 400, f"Failed to update weights: {problem}."
        return 200, "Succeeded to update model weights."

    def _update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.weight_version = body["new_version"]
        return 200, "ok"

    def close(self) -> None:
        if not self.is_dead:
            self.die()


def _server(fake: FakeSglang, port: int) -> ThreadingHTTPServer:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one write for each reply: otherwise TCP delays it

        def do_GET(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                status, found = fake.answer(self.path.partition("?")[0], json.loads(data or b"{}"))
            reply = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_: Any) -> None:
            """A hook raised: the connection ends without a reply."""

    return Server(("127.0.0.1", port), Handler)
