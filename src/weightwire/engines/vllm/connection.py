"""Connections to vLLM servers."""

from __future__ import annotations

from weightwire.engines.server_connection import ServerConnection, ServerSoftware

__all__ = ["START", "connect_to_vllm"]

START = 'start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "weightwire"}\''
_KEY = "VLLM_API_KEY"  # vLLM itself reads the same variable
_VLLM = ServerSoftware("vLLM", START, "0.29 or newer, in developer mode", "/version", "/weight_info", _KEY)


def connect_to_vllm(url: str) -> ServerConnection:
    """Raises an EngineError if the URL is malformed. Connects with the first call."""
    return ServerConnection(url, _VLLM)
