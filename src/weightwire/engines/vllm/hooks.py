"""Replaces functions of vLLM by our own, in the processes of vLLM.

vLLM may load plugins more than once, and a version may lack what another has: each function is replaced once, and only
if it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

__all__ = ["replace_in_vllm", "uses_weightwire"]

_MARK = "of_weightwire"
Function = Callable[..., Any]


def replace_in_vllm(module: str, name: str, replacement_of: Callable[[Function], Function]) -> None:
    """Replaces a function or `Class.method` of a module. `replacement_of` gets the original, for calls."""
    try:
        owner: Any = import_module(module)
    except ImportError:
        return
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, last, None)
    if original is None or hasattr(original, _MARK):
        return
    replacement = wraps(original)(replacement_of(original))
    setattr(replacement, _MARK, True)
    setattr(owner, last, replacement)


def uses_weightwire(vllm_config: Any) -> bool:
    """Whether a server was started with our backend."""
    transfer = vllm_config.weight_transfer_config
    return transfer is not None and transfer.backend == "weightwire"
