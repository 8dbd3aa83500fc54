"""Serve: what keeps an engine's live weights at the version that a follower holds.

engine            what an engine offers, wherever it runs
registry          the engines that have a name, built in or installed
version_keeper    one follower, any number of engines: stage, swap, reload
weight_map        where each weight of a checkpoint lies in a running model, learnt from the model's own loader
live_model        a running model's weights: patched in place, proven, put back if anything is wrong
torch             the engine for a torch module in this process
vllm              the engine for a vLLM server on this machine
"""

from typing import TYPE_CHECKING

from weightwire.engines.engine import Engine, RolloutServer, ServedVersion, Swap
from weightwire.engines.registry import EngineKind, Program, engine_names, find_engine, open_engine
from weightwire.engines.version_keeper import Keeper
from weightwire.system import lazy_exports

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
