"""Registers the weightwire backend when vLLM starts."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """vLLM calls this in each of its processes: see `vllm.general_plugins` in pyproject.toml."""
    from weightwire.engines.vllm.adapter_steps import load_adapters_once
    from weightwire.engines.vllm.packing import keep_plain
    from weightwire.engines.vllm.post_load import observe_loading
    from weightwire.engines.vllm.prefix_cache import forget_while_running
    from weightwire.engines.vllm.sleep_mark import mark_sleep

    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # before 0.29: vLLM itself then rejects the backend
        return
    if "weightwire" not in WeightTransferEngineFactory._registry:  # it may be called more than once
        WeightTransferEngineFactory.register_engine("weightwire", "weightwire.engines.vllm.plugin", "WeightwireEngine")
    keep_plain()
    observe_loading()
    forget_while_running()
    load_adapters_once()
    mark_sleep()
