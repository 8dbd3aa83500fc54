"""How a checkpoint is quantized, as its `config.json` says, and which of these schemes can be patched in vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weightwire.errors import EngineError
from weightwire.system import read_regular

__all__ = ["PATCHABLE", "check_same_scheme", "scheme_of"]

PATCHABLE = ("compressed-tensors pack-quantized", "gptq", "awq", "fp8 in blocks")
"""Schemes for which vLLM's processing was tested with patches. Add one together with a row in the tests."""


def scheme_of(config: Any) -> str:
    """The scheme in a `quantization_config`, or an empty string for a checkpoint that is not quantized."""
    if not isinstance(config, dict):
        return ""
    method = str(config.get("quant_method", "unknown"))
    if method == "fp8" and config.get("weight_block_size"):
        return "fp8 in blocks"
    return f"{method} {config['format']}" if "format" in config else method


def check_same_scheme(checkpoint: Path, served: str) -> None:
    """Checks that a checkpoint is quantized as the engine serves it. One without config.json is compared by names."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(read_regular(path)) if path.exists() else None
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    given = scheme_of(config.get("quantization_config"))
    if given != served:
        raise EngineError(
            f"the run is {_named(given)}, but vLLM serves weights that are {_named(served)}",
            hint="start vLLM from a checkpoint of the run",
        )


def _named(scheme: str) -> str:
    return f"quantized ({scheme})" if scheme else "not quantized"
