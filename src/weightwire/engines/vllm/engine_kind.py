"""vLLM's entries in the registry of engines: a server's model, one of its adapters, and its draft model."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from weightwire.engines.registry import EngineKind, Program
from weightwire.engines.vllm.client import VllmEngine
from weightwire.engines.vllm.draft_engine import VllmDraftEngine
from weightwire.engines.vllm.lora_engine import VllmLoraEngine
from weightwire.engines.vllm.rollout_server import VllmRolloutServer

__all__ = ["VLLM", "VLLM_DRAFT", "VLLM_LORA"]

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints through which weights are updated
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # For CPUs, without effect elsewhere: 1 GB of KV cache, and no binding to cores.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def _launch(model: Path, port: int) -> Program:
    """The command for a small model, on any machine."""
    # Not `vllm serve`, which needs a distribution named vllm.
    vllm: list[str | Path] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    sizes = ["--max-model-len", "128", "--max-num-seqs", "128", "--dtype", "bfloat16", "--enforce-eager"]
    transfer = ["--weight-transfer-config", json.dumps({"backend": "weightwire"})]
    return Program([*vllm, "--host", "127.0.0.1", "--port", str(port), *sizes, *transfer], _ENVIRONMENT)


VLLM = EngineKind(
    VllmEngine, VllmRolloutServer, _launch, needs=("vllm",), connect_keeping=partial(VllmEngine, cache="keep")
)
VLLM_LORA = EngineKind(VllmLoraEngine)
VLLM_DRAFT = EngineKind(VllmDraftEngine)
