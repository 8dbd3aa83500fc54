"""The engine for a vLLM server on this machine.

    plugin             inside vLLM: a weight transfer backend, found by its entry point
    packing            inside vLLM: keeps weights where they can be patched, and tells where they are not
    registration       inside vLLM: what the entry point calls
    orders             what the two sides say to each other
    client             beside vLLM, in the follower: gives the orders
    connection         one HTTP connection to a server, and what its refusals mean
    rollout_server     what a trainer asks a server
    kind               vLLM's place in the registry of engines
    sample_versions    which tokens of a sample came from which version

A follower writes a patch to shared memory; the engine reads it there, and says in a file beside it what came of it.
"""

from typing import TYPE_CHECKING

from weightwire.system import lazy_exports

if TYPE_CHECKING:
    from weightwire.engines.vllm.client import VllmEngine
    from weightwire.engines.vllm.registration import register
    from weightwire.engines.vllm.rollout_server import served_version
    from weightwire.engines.vllm.sample_versions import oldest_version, spans_of

__all__ = ["VllmEngine", "oldest_version", "register", "served_version", "spans_of"]

__getattr__ = lazy_exports(
    __name__,
    {
        "VllmEngine": "client",
        "oldest_version": "sample_versions",
        "register": "registration",
        "served_version": "rollout_server",
        "spans_of": "sample_versions",
    },
)
