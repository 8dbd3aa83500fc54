"""A vLLM server as a trainer sees it: which version it serves, and whether a follower can update it."""

from __future__ import annotations

from typing import Any

from weightwire.engines.vllm.connection import START, VllmConnection, public_url
from weightwire.errors import EngineError

__all__ = ["VllmRolloutServer", "served_version"]


class VllmRolloutServer:
    """By its URL. A connection for each call: they are rare, and come from several threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        VllmConnection(url).close()  # refuses what is not a URL

    def served_version(self) -> int | None:
        text = self._get("/weight_info").get("weight_version")
        return int(text) if isinstance(text, str) and text.isdecimal() else None

    def check(self) -> None:
        self.served_version()  # which says what is wrong where vLLM is too old, or not in developer mode
        config = self._get("/server_info?config_format=json").get("vllm_config")
        transfer = config.get("weight_transfer_config") if isinstance(config, dict) else None
        backend = str(transfer.get("backend", "")) if isinstance(transfer, dict) else ""
        if backend != "weightwire":
            raise EngineError(
                f"{public_url(self._url)}: does not serve with the weightwire backend ({backend or 'it has none'})",
                hint=START,
            )

    def forget_version(self) -> None:
        with VllmConnection(self._url) as connection:
            connection.post("/update_weight_version", {"new_version": "unknown"})

    def _get(self, path: str) -> dict[str, Any]:
        with VllmConnection(self._url) as connection:
            return connection.get(path)


def served_version(url: str) -> int | None:
    """The version that a vLLM server says it serves; None if it has never been given one."""
    return VllmRolloutServer(url).served_version()
