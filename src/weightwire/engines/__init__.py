"""Serve: what keeps an engine's live weights at the version that a follower holds.

engine            what an engine offers, wherever it runs
version_keeper    one follower, any number of engines: stage, swap, reload
weight_map        where each weight of a checkpoint lies in a running model, learnt from the model's own loader
live_model        a running model's weights: patched in place, proven, put back if anything is wrong
torch             the engine for a torch module in this process
vllm              the engine for a vLLM server on this machine
"""

from weightwire.engines.engine import Engine, ServedVersion, Swap
from weightwire.engines.version_keeper import Keeper
from weightwire.system import lazy_exports

__all__ = ["Engine", "Keeper", "ServedVersion", "Swap", "TorchEngine"]

__getattr__ = lazy_exports(__name__, {"TorchEngine": "torch"})
