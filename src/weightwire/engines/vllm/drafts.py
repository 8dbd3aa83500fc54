"""Draft models of speculative decoding: what vLLM predicts tokens with, before the model itself checks them.

A draft never changes what is sampled, only how fast. Layers for multi-token prediction (MTP) in the model's own
checkpoint are updated with the model: see `model_with_draft`. A separate draft model can follow a run of its own: see
`draft_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["DRAFT", "draft_model", "draft_names", "is_in_checkpoint"]

DRAFT = "draft"
"""The model of orders for a separate draft."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp(?:_layers)?\.")


def draft_names(config: Any) -> Callable[[str], bool]:
    """Whether a tensor belongs to the MTP layers of a checkpoint. DeepSeek numbers them after the last layer."""
    layers = getattr(config, "num_hidden_layers", None)
    count = getattr(config, "num_nextn_predict_layers", None) or 0

    def is_draft(name: str) -> bool:
        found = _LAYER.search(name)
        is_extra = found is not None and layers is not None and layers <= int(found.group(1)) < layers + count
        return is_extra or _MTP.search(name) is not None

    return is_draft


def draft_model(vllm_config: Any) -> str:
    """The draft model that a server predicts with, or an empty string."""
    speculation = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculation, "draft_model_config", None)
    return "" if draft is None else str(getattr(draft, "model", "") or getattr(speculation, "method", "draft"))


def is_in_checkpoint(vllm_config: Any) -> bool:
    """Whether a server predicts with MTP layers of the checkpoint that it serves."""
    speculation, target = getattr(vllm_config, "speculative_config", None), vllm_config.model_config
    draft = getattr(speculation, "draft_model_config", None)
    if draft is None or getattr(speculation, "method", "") != "mtp":
        return False
    return draft.model in (target.model, getattr(target, "model_weights", None) or target.model)
