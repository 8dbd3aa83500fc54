"""Keeps vLLM from reading an adapter again for every token.

Up to 0.32, vLLM remembers that an adapter was loaded in place, and then loads it again in each step of the model that
uses it. Loading in place belongs to the request that loads, so steps forget it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["load_adapters_once"]


def load_adapters_once() -> None:
    try:
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    except ImportError:
        return
    apply = getattr(LRUCacheWorkerLoRAManager, "_apply_adapters", None)
    if apply is None or getattr(apply, "of_weightwire", False):
        return

    def apply_without_loading_again(self: Any, lora_requests: Iterable[Any]) -> None:
        for request in lora_requests:
            if request and getattr(request, "load_inplace", False):
                request.load_inplace = False
        apply(self, lora_requests)

    apply_without_loading_again.of_weightwire = True  # type: ignore[attr-defined]
    LRUCacheWorkerLoRAManager._apply_adapters = apply_without_loading_again
