"""The engine for one adapter of a vLLM server: loads each version into the server, which does not pause for it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from weightwire.delta import Delta
from weightwire.engines.engine import EngineHealth, ServedVersion, Swap, asleep
from weightwire.engines.server_connection import QUICK, NotOffered, ServerConnection, ServerRefusal
from weightwire.engines.vllm.adapter_base import base_mismatch
from weightwire.engines.vllm.adapter_links import AdapterLinks, linked_version
from weightwire.engines.vllm.connection import connect_to_vllm
from weightwire.engines.vllm.health_check import VllmHealthCheck, is_asleep
from weightwire.errors import EngineError, WeightwireError, public_url
from weightwire.weights import ADAPTER_CONFIG, ADAPTER_FILE, Checkpoint

__all__ = ["VllmLoraEngine"]

_START = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
_EXAMPLE = "vllm-lora=http://127.0.0.1:8000,name=NAME"
_LOAD = "/v1/load_lora_adapter"
_LONG = 600.0  # seconds, to load an adapter
# Older versions reuse cached keys and values of the version before.
_OLDEST = (0, 32)
_HINTS = {
    "enable-lora": _START,
    "max_lora_rank": "start vLLM with a larger --max-lora-rank, or train an adapter of a lower rank",
    "conflicts with a served base model": "choose another name for the adapter",
}


class VllmLoraEngine:
    """An adapter of a vLLM server, given as `URL,name=NAME`. Clients ask for it with `"model": NAME`.

    The server must see the replica's directory under the same path.
    """

    def __init__(self, text: str) -> None:
        url, _, adapter = text.partition(",name=")
        if not adapter.strip() or not adapter.isprintable():
            raise EngineError("the engine vllm-lora needs the name of the adapter", hint=f"use {_EXAMPLE}")
        self.name = f"{public_url(url).rstrip('/')},name={adapter}"
        self._adapter = adapter
        self._holding: ServedVersion | None = None
        self._path = ""  # under which the server has `holding`
        self._server = connect_to_vllm(url)
        self._health = VllmHealthCheck(url, self._read_version)

    @property
    def holding(self) -> ServedVersion | None:
        return self._holding

    @property
    def can_patch(self) -> bool:
        return False  # vLLM loads adapters from files only

    def attach(self, run: str = "") -> ServedVersion | None:
        self._holding = None
        self._check_server()
        self._path = _path_of(_models(self._server, QUICK), self._adapter)
        self._holding = linked_version(self._path)
        return self._holding

    def check_health(self) -> EngineHealth:
        return self._health.check()

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        return False  # the server does not tell which weights it has loaded

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        raise EngineError(f"{self.name}: an adapter cannot be patched", hint="reload it")

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        self._check_adapter(checkpoint)
        if is_asleep(self._server, QUICK):
            raise asleep(self.name)
        if self._holding is None or self._holding.run != target.run:  # all versions of a run have the same shapes
            self._check_base(checkpoint)
        links = AdapterLinks(checkpoint.parent, self.name)
        try:
            path = links.add(checkpoint, target.version)
            ready = time.perf_counter()
            try:
                self._load(path)
            except ServerRefusal:
                links.remove(path)
                raise
            loaded = time.perf_counter()
            self._holding, self._path = target, str(path)
            links.make_newest(path)
        except OSError as problem:
            raise EngineError(
                f"{problem.filename or checkpoint}: cannot be linked for the server ({problem.strerror})",
                hint="check the permissions and the free space of the replica's directory",
            ) from problem
        return Swap(ready - began, loaded - ready)

    def close(self) -> None:
        self._server.close()
        self._health.close()

    # --- the server ----------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        """Raises a ServerRefusal if the server has not loaded it. It then serves the version before."""
        known, self._holding = self._holding, None  # unknown until it has answered
        body = {"lora_name": self._adapter, "lora_path": str(path), "load_inplace": True}
        try:
            self._server.post(_LOAD, body, _LONG)
        except NotOffered as problem:
            self._holding = known
            raise ServerRefusal(
                f"{self.name}: the server does not find {path}",
                hint="run it on this machine, with access to the replica's directory under the same path",
            ) from problem
        except ServerRefusal as problem:
            self._holding = known
            hint = next((hint for part, hint in _HINTS.items() if part in problem.message), "see the server's log")
            raise ServerRefusal(f"{self.name}: {problem.message}", hint=hint) from problem

    def _check_server(self) -> None:
        about = self._server.get("/version").get("version")
        found = re.match(r"(\d+)\.(\d+)", about) if isinstance(about, str) else None
        if found and (int(found[1]), int(found[2])) < _OLDEST:
            raise EngineError(
                f"{self.name}: vLLM {about} is too old for adapters that change",
                hint=f"install vLLM {'.'.join(map(str, _OLDEST))} or newer",
            )
        try:
            self._server.post(_LOAD, {"lora_name": "", "lora_path": ""})  # refused, without any effect
        except NotOffered as problem:
            raise EngineError(f"{self.name}: the server does not load adapters while it runs", hint=_START) from problem
        except ServerRefusal:
            pass

    def _check_adapter(self, checkpoint: Path) -> None:
        for name in (ADAPTER_FILE, ADAPTER_CONFIG):
            if not (checkpoint / name).is_file():
                raise EngineError(
                    f"{self.name}: the run is not an adapter: it has no {name}",
                    hint="publish a PEFT model without merge=True, or use --engine vllm=URL",
                )

    def _check_base(self, checkpoint: Path) -> None:
        """Compares the shapes, if the server serves a model from a directory on this machine."""
        for model in _models(self._server, QUICK):
            root = model.get("root")
            if model.get("parent") or not isinstance(root, str) or not os.path.isdir(root):
                continue
            try:
                base = Checkpoint(root)
            except WeightwireError:  # not safetensors: vLLM reads more formats
                continue
            if problem := base_mismatch(Checkpoint(checkpoint), base):
                raise EngineError(
                    f"{self.name}: the adapter is for another base model than {root}: {problem}",
                    hint="follow the run of an adapter that was trained on this model",
                )

    def _read_version(self, server: ServerConnection, timeout: float) -> int | None:
        """The version of the path that the server has. Any other path is somebody else's."""
        path, held = _path_of(_models(server, timeout), self._adapter), self._holding
        return held.version if held is not None and path == self._path else None


def _models(server: ServerConnection, timeout: float) -> list[dict[str, Any]]:
    listed = server.get("/v1/models", timeout).get("data")
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _path_of(models: list[dict[str, Any]], adapter: str) -> str:
    """The path from which the server has loaded an adapter; empty if it has none of this name."""
    return next((str(one.get("root", "")) for one in models if one.get("id") == adapter and one.get("parent")), "")
