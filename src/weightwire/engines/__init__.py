"""Serve: keeps an engine's live weights at the version that a follower holds.

engine            the interface of an engine
registry          engines by name, built in or installed
version_keeper    keeps any number of engines at a follower's version: stage, swap, reload
weight_map        where each checkpoint tensor lies in a running model, learned from the model's own loader
live_model        a running model's weights: patched in place, verified, restored if a check fails
torch             the engine for a torch module in this process
vllm              the engine for a vLLM server on this machine
"""

from typing import TYPE_CHECKING

from weightwire.engines.engine import Engine, RolloutServer, ServedVersion, Swap
from weightwire.engines.registry import EngineKind, Program, engine_names, find_engine, open_engine
from weightwire.engines.version_keeper import Keeper
from weightwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from weightwire.engines.torch import TorchEngine

__all__ = [
    "Engine",
    "EngineKind",
    "Keeper",
    "Program",
    "RolloutServer",
    "ServedVersion",
    "Swap",
    "TorchEngine",
    "engine_names",
    "find_engine",
    "open_engine",
]

__getattr__ = lazy_exports(__name__, {"TorchEngine": "torch"})
