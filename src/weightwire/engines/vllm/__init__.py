"""The engine for a vLLM server on this machine.

    plugin      inside vLLM: a weight transfer backend, found by its entry point
    layout      inside vLLM: keeps weights where they can be patched, and tells where they are not
    orders      what the two sides say to each other
    client      beside vLLM, in the follower: gives the orders over HTTP

A follower writes a patch to shared memory; the engine reads it there, and says in a file beside it what came of it.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """For vLLM, which calls it in each of its processes: see `vllm.general_plugins` in pyproject.toml."""
    from weightwire.engines.vllm.layout import keep_plain

    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # before 0.29: whoever asks for the backend is told by vLLM that there is none
        return
    if "weightwire" not in WeightTransferEngineFactory._registry:  # it may be called more than once
        WeightTransferEngineFactory.register_engine("weightwire", "weightwire.engines.vllm.plugin", "WeightwireEngine")
    keep_plain()
