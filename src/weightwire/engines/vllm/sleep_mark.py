"""Marks a vLLM that has slept: its weights may be gone when it wakes up. In vLLM's engine core, with our backend.

A follower looks once a second, and could miss a short sleep. The mark stays until the weights were compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightwire.engines.vllm.hooks import replace_in_vllm, uses_weightwire

__all__ = ["SLEPT", "mark_sleep"]

SLEPT = "slept"
"""The version that the server reports after a sleep. It is that of the served model: a draft forgets its own."""


def mark_sleep() -> None:
    """With our backend, makes vLLM report no version after `POST /sleep`, except for level 0, which only pauses."""
    replace_in_vllm("vllm.v1.engine.core", "EngineCore.sleep", _marking)


def _marking(sleep: Callable[..., Any]) -> Callable[..., Any]:
    def mark_and_sleep(self: Any, level: int = 1, *given: Any, **named: Any) -> Any:
        if level >= 1 and uses_weightwire(self.vllm_config) and hasattr(self, "set_weight_version"):
            self.set_weight_version(SLEPT)
            if self.vllm_config.speculative_config is not None:
                self.model_executor.collective_rpc(_forget_draft)
        return sleep(self, level, *given, **named)

    return mark_and_sleep


def _forget_draft(worker: Any) -> None:
    worker.weight_transfer_engine.forget_draft()
