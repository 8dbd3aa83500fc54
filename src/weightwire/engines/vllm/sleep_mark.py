"""Marks a vLLM that has slept: its weights may be gone when it wakes up. In vLLM's engine core, with our backend.

A follower looks once a second, and could miss a short sleep. The mark stays until the weights were compared.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SLEPT", "mark_sleep"]

SLEPT = "slept"
"""The version that the server reports after a sleep."""


def mark_sleep() -> None:
    """With our backend, makes vLLM report no version after `POST /sleep`, except for level 0, which only pauses."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    sleep = getattr(EngineCore, "sleep", None)
    if sleep is None or not hasattr(EngineCore, "set_weight_version") or getattr(sleep, "of_weightwire", False):
        return

    def mark_and_sleep(self: Any, level: int = 1, *given: Any, **named: Any) -> Any:
        transfer = self.vllm_config.weight_transfer_config
        if level >= 1 and transfer is not None and transfer.backend == "weightwire":
            self.set_weight_version(SLEPT)
        return sleep(self, level, *given, **named)

    mark_and_sleep.of_weightwire = True  # type: ignore[attr-defined]
    EngineCore.sleep = mark_and_sleep
