"""Serve: keeps an engine's live weights at the version that a follower holds.

engine            the interface of an engine
registry          engines by name, built in or installed
engine_monitor    what is known about each engine: the results of updates and of checks
ready_check       whether every engine serves a version that is new enough
version_keeper    keeps any number of engines at a follower's version: stage, swap, reload
weight_map        where each checkpoint tensor lies in a running model, learned from the model's own loader
live_model        a running model's weights: patched in place, verified, restored if a check fails
orders            the messages between a follower and the workers of a server; both sides are:
order_desk        inside a worker: carries out orders on its live model
worker_orders     in the follower: sends orders, and knows what the workers hold
shared_directory  where patches and answers are passed, in shared memory
server_connection one HTTP connection to a server, and its errors
torch             the engine for a torch module in this process
vllm              the engine for a vLLM server on this machine
sglang            the engine for an SGLang server on this machine (experimental)
"""

from typing import TYPE_CHECKING

from weightwire.engines.engine import (
    CachePolicy,
    CheckedEngine,
    Engine,
    EngineHealth,
    RolloutServer,
    ServedVersion,
    Swap,
)
from weightwire.engines.engine_monitor import EngineStatus
from weightwire.engines.ready_check import EngineState, ReadyCheck, ReadyLimits, ReplicaState
from weightwire.engines.registry import EngineKind, Program, engine_names, find_engine, open_engine
from weightwire.engines.version_keeper import Keeper
from weightwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from weightwire.engines.torch import TorchEngine

__all__ = [
    "CachePolicy",
    "CheckedEngine",
    "Engine",
    "EngineHealth",
    "EngineKind",
    "EngineState",
    "EngineStatus",
    "Keeper",
    "Program",
    "ReadyCheck",
    "ReadyLimits",
    "ReplicaState",
    "RolloutServer",
    "ServedVersion",
    "Swap",
    "TorchEngine",
    "engine_names",
    "find_engine",
    "open_engine",
]

__getattr__ = lazy_exports(__name__, {"TorchEngine": "torch"})
