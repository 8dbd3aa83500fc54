"""Keeps vLLM from reading an adapter again for every token.

Up to 0.32, vLLM remembers that an adapter was loaded in place, and then loads it again in each step of the model that
uses it. Loading in place belongs to the request that loads, so steps forget it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weightwire.engines.vllm.hooks import replace_in_vllm

__all__ = ["load_adapters_once"]


def load_adapters_once() -> None:
    replace_in_vllm("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager._apply_adapters", _without_loading_again)


def _without_loading_again(apply: Callable[..., None]) -> Callable[..., None]:
    def apply_without_loading_again(self: Any, lora_requests: Iterable[Any]) -> None:
        for request in lora_requests:
            if request and getattr(request, "load_inplace", False):
                request.load_inplace = False
        apply(self, lora_requests)

    return apply_without_loading_again
