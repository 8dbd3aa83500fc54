"""A server in this process that loads adapters like vLLM, to test what a follower does with its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from project.provocations.case import Answer, http_server

__all__ = ["FakeLoraServer", "fake_lora_server"]


@dataclass
class FakeLoraServer:
    """`refusal` is its answer to the next loads: a status and a message. It reads the files as vLLM does."""

    base: str = "served-model"
    version: str = "0.32.1"
    is_sleeping: bool = False
    updates: bool = True  # VLLM_ALLOW_RUNTIME_LORA_UPDATING
    refusal: tuple[int, str] | None = None
    key: str = ""
    url: str = ""
    paths: dict[str, str] = field(default_factory=dict)  # by name
    loaded: list[dict[str, Any]] = field(default_factory=list)  # the weights of each load

    def respond(self, method: str, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        if self.key and path.startswith("/v1/") and key != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/models":
            cards = [{"id": self.base, "root": self.base, "parent": None}]
            cards += [{"id": name, "root": root, "parent": self.base} for name, root in self.paths.items()]
            return 200, {"data": cards}
        if path == "/v1/load_lora_adapter" and method == "POST" and self.updates:
            return self._load(body)
        known = {"/version": {"version": self.version}, "/is_sleeping": {"is_sleeping": self.is_sleeping}}
        return (200, known[path]) if path in known else (404, {"detail": "Not Found"})

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        name, path = body["lora_name"], body["lora_path"]
        if not name or not path:
            return 400, {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}}
        if self.refusal is not None:
            return self.refusal[0], {"error": {"message": self.refusal[1]}}
        if not body["load_inplace"] and name in self.paths:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        json.loads((Path(path) / "adapter_config.json").read_bytes())
        self.loaded.append(load_file(Path(path) / "adapter_model.safetensors"))
        self.paths[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully."


@contextmanager
def fake_lora_server(**settings: Any) -> Iterator[FakeLoraServer]:
    server = FakeLoraServer(**settings)

    def respond(request: Any) -> Answer:
        body = json.loads(request.body or b"null")
        status, answer = server.respond(request.command, request.path, body, request.headers.get("Authorization"))
        return status, {}, (answer if isinstance(answer, str) else json.dumps(answer)).encode()

    with http_server(respond) as server.url:
        yield server
