"""A trainer's view of a vLLM server: the version it serves, and whether a follower can update it."""

from __future__ import annotations

from typing import Any

from weightwire.engines.vllm.connection import START, connect_to_vllm
from weightwire.errors import EngineError, public_url

__all__ = ["VllmRolloutServer", "served_version"]


class VllmRolloutServer:
    """A server at a URL. Connects for each call, because calls are rare and come from several threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        connect_to_vllm(url).close()  # raises if the URL is malformed

    def served_version(self) -> int | None:
        text = self._get("/weight_info").get("weight_version")
        return int(text) if isinstance(text, str) and text.isdecimal() else None

    def check(self) -> str:
        self.served_version()  # raises if vLLM is too old or not in developer mode
        config = self._get("/server_info?config_format=json").get("vllm_config")
        transfer = config.get("weight_transfer_config") if isinstance(config, dict) else None
        backend = str(transfer.get("backend", "")) if isinstance(transfer, dict) else ""
        if backend != "weightwire":
            found = backend or "no backend"
            raise EngineError(
                f"{public_url(self._url).rstrip('/')}: does not serve with the weightwire backend ({found})",
                hint=START,
            )
        about = self._get("/version")  # `weightwire serve` answers like vLLM, and adds its name
        return f"{about.get('server', 'vLLM')} {about.get('version', 'of unknown version')}"

    def forget_version(self) -> None:
        with connect_to_vllm(self._url) as connection:
            connection.post("/update_weight_version", {"new_version": "unknown"})

    def _get(self, path: str) -> dict[str, Any]:
        with connect_to_vllm(self._url) as connection:
            return connection.get(path)


def served_version(url: str) -> int | None:
    """The version that a vLLM server reports, or None if it was never given one."""
    return VllmRolloutServer(url).served_version()
