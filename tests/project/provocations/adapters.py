"""Errors of adapters in a vLLM server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from project.provocations.case import Case, Provocation
from support.fake_lora_server import fake_lora_server
from weightwire import diff
from weightwire.engines import ServedVersion
from weightwire.engines.registry import open_engine
from weightwire.engines.vllm import VllmLoraEngine

FACTOR = "base_model.model.model.layers.0.q_proj.lora_A.weight"


def adapter(case: Case, columns: int = 4) -> Path:
    case.file("checkpoints/1/adapter_config.json", "{}")
    about = '{"run": "r", "version": 1, "commit": "c", "state": "s"}'
    path = case.file("checkpoints/1/weightwire.json", about).parent
    safetensors.numpy.save_file({FACTOR: np.ones((2, columns), np.float32)}, path / "adapter_model.safetensors")
    return path


def model(case: Case, columns: int) -> str:
    path = case.file("base/config.json", "{}").parent
    weights = {"model.layers.0.q_proj.weight": np.ones((8, columns), np.float32)}
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    return str(path)


def engine(work: Callable[[Case, VllmLoraEngine], Any], **settings: Any) -> Provocation:
    def provoke(case: Case) -> None:
        base = {"base": model(case, settings.pop("columns"))} if "columns" in settings else {}
        with fake_lora_server(**base, **settings) as server:
            made = VllmLoraEngine(f"{server.url},name=math")
            try:
                work(case, made)
            finally:
                made.close()

    return provoke


def attach(case: Case, engine: VllmLoraEngine) -> None:
    engine.attach()


def reload(case: Case, engine: VllmLoraEngine) -> None:
    engine.reload(adapter(case), ServedVersion("r", 1, "s"))


def reload_a_model(case: Case, engine: VllmLoraEngine) -> None:
    engine.reload(case.file("checkpoints/1/model.safetensors", "").parent, ServedVersion("r", 1, "s"))


def reload_without_space(case: Case, engine: VllmLoraEngine) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(case.here / "checkpoints"))

    case.patch.setattr("os.link", full)
    case.patch.setattr("shutil.copy", full)
    reload(case, engine)


def patch(case: Case, engine: VllmLoraEngine) -> None:
    weights = {FACTOR: np.ones(4, np.float32)}
    engine.patch(diff(weights, weights), ServedVersion("r", 2, "s"))


PROVOCATIONS: list[Provocation] = [
    lambda case: open_engine("vllm-lora=http://127.0.0.1:8000"),
    engine(attach, updates=False),
    engine(attach, version="0.29.1"),
    engine(attach, key="secret"),
    engine(reload, refusal=(500, "LoRA rank 64 is greater than max_lora_rank 16.")),
    engine(reload, refusal=(404, "Loading lora math failed: No adapter found for PATH")),
    engine(reload, columns=8),
    engine(reload_a_model),
    engine(reload_without_space),
    engine(patch),
]
