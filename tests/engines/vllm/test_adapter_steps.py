"""vLLM loads an adapter when it is told to, and not again in every step."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from weightwire.engines.vllm.adapter_steps import load_adapters_once


class Request:
    load_inplace = True


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class that loads like vLLM's, in a module of its name."""

    class Manager:
        def __init__(self) -> None:
            self.loaded = 0

        def _apply_adapters(self, lora_requests: Any) -> None:
            for request in lora_requests:
                self.add_adapter(request)

        def add_adapter(self, request: Request) -> None:
            self.loaded += not self.loaded or request.load_inplace

    module = ModuleType("vllm.lora.worker_manager")
    module.LRUCacheWorkerLoRAManager = Manager  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Manager


def test_steps_do_not_load_an_adapter_again(manager: Any) -> None:
    load_adapters_once()
    load_adapters_once()  # vLLM may load plugins more than once
    made = manager()
    for _ in range(3):
        made._apply_adapters({Request()})
    assert made.loaded == 1
    made.add_adapter(Request())  # an explicit load
    assert made.loaded == 2
