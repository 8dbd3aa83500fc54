"""The engine for a vLLM server on this machine.

    plugin             inside vLLM: a weight transfer backend, found by its entry point
    hooks              inside vLLM: replaces functions of vLLM
    model_desk         inside vLLM: carries out the orders for one model
    packing            inside vLLM: keeps weights in a layout that can be patched, and finds those that are not
    prefix_cache       inside vLLM: forgets cached prefixes of old weights while requests run
    sleep_mark         inside vLLM: marks a server that has slept
    registration       inside vLLM: called by the entry point
    client             in the follower: sends the orders
    update_session     in the follower: vLLM's update sessions, one at a time
    connection         what is particular to connections with vLLM
    rollout_server     a trainer's view of a server
    draft_engine       in the follower: updates a separate draft model
    lora_engine        in the follower: loads the versions of an adapter
    adapter_links      the paths under which a server reads an adapter
    adapter_base       whether an adapter fits the model of a server
    adapter_steps      inside vLLM: keeps it from reading an adapter again for every token
    engine_kind        vLLM's entries in the registry of engines
    sample_versions    which tokens of a sample came from which version

A follower writes a patch to shared memory. The engine reads it there and writes its answer to a file beside it.
"""

from typing import TYPE_CHECKING

from weightwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from weightwire.engines.vllm.client import VllmEngine
    from weightwire.engines.vllm.lora_engine import VllmLoraEngine
    from weightwire.engines.vllm.registration import register
    from weightwire.engines.vllm.rollout_server import served_version
    from weightwire.engines.vllm.sample_versions import oldest_version, spans_of

__all__ = ["VllmEngine", "VllmLoraEngine", "oldest_version", "register", "served_version", "spans_of"]

__getattr__ = lazy_exports(
    __name__,
    {
        "VllmEngine": "client",
        "VllmLoraEngine": "lora_engine",
        "oldest_version": "sample_versions",
        "register": "registration",
        "served_version": "rollout_server",
        "spans_of": "sample_versions",
    },
)
