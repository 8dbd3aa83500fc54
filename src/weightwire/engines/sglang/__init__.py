"""The engine for an SGLang server on this machine. Experimental: it has never run with a real server.

    loader             inside SGLang: called by its name for each order, in every worker
    order_payload      how an order travels in SGLang's requests: as a tiny tensor
    http_api           the requests, as SGLang's classes want them
    server_setup       what a server says about itself
    sglang_engine      in the follower: sends the orders
    sglang_kind        SGLang's entry in the registry of engines

Everything else is shared with vLLM's engine. SGLang itself loads whole checkpoints; only patches are ours.
"""

from typing import TYPE_CHECKING

from weightwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from weightwire.engines.sglang.loader import load
    from weightwire.engines.sglang.sglang_engine import SglangEngine

__all__ = ["SglangEngine", "load"]

__getattr__ = lazy_exports(__name__, {"SglangEngine": "sglang_engine", "load": "loader"})
