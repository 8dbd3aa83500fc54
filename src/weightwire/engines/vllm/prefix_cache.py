"""Lets vLLM forget cached prefixes while requests run. In vLLM's engine core, with our backend.

Cached prefixes hold keys and values of the weights that computed them, so an update must drop them. vLLM resets its
prefix cache only if no block is in use: it first takes the blocks of running requests, which then compute them again.
To keep those blocks, two things must hold:

- No block of old weights stays in the cache, whether a request uses it or not.
- The blocks that a running request fills later do not get there under their usual names. They depend on its old
  blocks, and another request with the same tokens must not find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from secrets import token_bytes
from typing import Any

from weightwire.engines.vllm.hooks import replace_in_vllm, uses_weightwire

__all__ = ["forget_while_running", "why_not_kept"]


def forget_while_running() -> None:
    """With our backend, makes `POST /reset_prefix_cache` succeed while requests run. They keep their blocks."""
    replace_in_vllm("vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", _forgetting)


def _forgetting(reset: Callable[..., bool]) -> Callable[..., bool]:
    def reset_or_forget(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        is_ours = uses_weightwire(self.vllm_config)
        with ExitStack() as stack:
            if is_ours and not reset_running_requests and not why_not_kept(self.vllm_config):
                _rename_blocks_of_running(self)
                for pool in _pools(self):
                    stack.enter_context(_counted_as_unused(pool))
            return bool(reset(self, reset_running_requests, reset_connector))

    return reset_or_forget


def why_not_kept(vllm_config: Any) -> str:
    """Why running requests of such a server cannot keep their blocks in an update; empty if they can."""
    model = vllm_config.model_config
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector holds a second copy (--kv-transfer-config)"
    if model.is_multimodal_model or model.is_encoder_decoder:
        return "the outputs of the model's encoder are cached, too"
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        return "vLLM stores the routed experts of cached blocks"
    return ""


def _rename_blocks_of_running(scheduler: Any) -> None:
    """Gives each request that has computed tokens block hashes of its own."""
    for request in scheduler.requests.values():
        if request.num_computed_tokens:
            salt = token_bytes(16)
            # vLLM derives the hash of the first block from this, and each later one from the hash before it.
            request.cache_salt = salt.hex()
            request.block_hashes[:] = [salt + number.to_bytes(4) for number in range(len(request.block_hashes))]


def _pools(scheduler: Any) -> list[Any]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return list({id(manager.block_pool): manager.block_pool for manager in managers}.values())


@contextmanager
def _counted_as_unused(pool: Any) -> Iterator[None]:
    """vLLM's reset drops the hashes of all blocks and frees none, but refuses to if it counts blocks in use."""
    pool.get_num_free_blocks = lambda: pool.num_gpu_blocks - 1  # one is never free
    try:
        yield
    finally:
        del pool.get_num_free_blocks
