"""Functions of vLLM are replaced once, and only if they are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightwire.engines.vllm.hooks import replace_in_vllm, uses_weightwire


class Owner:
    def answer(self, number: int) -> int:
        """The original."""
        return number


def one_more(original: Callable[..., int]) -> Callable[..., int]:
    return lambda *given: original(*given) + 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("vllm_of_this_test")
    module.Owner = type("Owner", (Owner,), {"answer": Owner.answer})
    module.answer = lambda number: number
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_function_and_a_method_are_replaced_once(module: Any) -> None:
    for _ in range(2):  # vLLM may load plugins more than once
        replace_in_vllm(module.__name__, "answer", one_more)
        replace_in_vllm(module.__name__, "Owner.answer", one_more)
    assert module.answer(1) == 2
    assert module.Owner().answer(1) == 2
    assert module.Owner.answer.__doc__ == "The original."


@pytest.mark.parametrize("name", ["missing", "Owner.missing", "Missing.answer"])
def test_what_a_version_of_vllm_lacks_is_left_out(module: Any, name: str) -> None:
    before = dict(vars(module))
    replace_in_vllm(module.__name__, name, one_more)
    assert vars(module) == before


def test_a_missing_module_is_left_out() -> None:
    replace_in_vllm("vllm_that_is_not_installed.part", "answer", one_more)


@pytest.mark.parametrize(("backend", "is_ours"), [("weightwire", True), ("nccl", False), (None, False)])
def test_only_servers_with_our_backend_are_ours(backend: str | None, is_ours: bool) -> None:
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    assert uses_weightwire(SimpleNamespace(weight_transfer_config=transfer)) is is_ours
