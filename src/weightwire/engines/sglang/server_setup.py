"""What an SGLang server says about itself: its settings, and the version that it reports to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightwire.engines.server_connection import ServerConnection, ServerSoftware
from weightwire.engines.sglang.http_api import LOADER, set_version
from weightwire.errors import EngineError, public_url

__all__ = ["ServerSetup", "SglangRolloutServer", "connect_to_sglang", "read_setup", "reported_version"]

_START = f"start SGLang with --custom-weight-loader {LOADER}, with weightwire in its environment"
_SGLANG = ServerSoftware("SGLang", _START, "0.5.12 or newer", "/server_info", "/model_info")


def connect_to_sglang(url: str) -> ServerConnection:
    """Raises an EngineError if the URL is malformed. Connects with the first call."""
    return ServerConnection(url, _SGLANG)


@dataclass(frozen=True)
class ServerSetup:
    version: str
    ranks: int


def read_setup(server: ServerConnection, name: str) -> ServerSetup:
    """Raises an EngineError if the server cannot be updated by a follower."""
    info = server.get("/server_info")
    if LOADER not in (info.get("custom_weight_loader") or ()):
        raise EngineError(f"{name}: does not serve with weightwire's loader", hint=_START)
    for setting, hint in _refused(info):
        raise EngineError(f"{name}: serves with {setting}, which weightwire cannot update", hint=hint)
    return ServerSetup(str(info.get("version", "of unknown version")), int(info.get("tp_size", 1)))


def _refused(info: dict[str, Any]) -> list[tuple[str, str]]:
    checks = [
        (int(info.get("dp_size") or 1) > 1, "data parallel", "start one server for each replica"),
        (int(info.get("pp_size") or 1) > 1, "pipeline parallel", "serve it with tensor parallel only"),
        (int(info.get("nnodes") or 1) > 1, "several machines", "serve it on one machine"),
        (bool(info.get("quantization")), "quantization", "serve it without quantization"),
        (bool(info.get("enable_eplb")), "expert load balancing", "serve it without --enable-eplb"),
    ]
    return [(setting, hint) for is_set, setting, hint in checks if is_set]


def reported_version(info: dict[str, Any]) -> int | None:
    """The version in an answer of /model_info, or None if the server was never given one."""
    text = info.get("weight_version")
    return int(text) if isinstance(text, str) and text.isdecimal() else None


class SglangRolloutServer:
    """A trainer's view of a server at a URL. Connects for each call, because calls are rare."""

    def __init__(self, url: str) -> None:
        self._url = url
        connect_to_sglang(url).close()  # raises if the URL is malformed

    def served_version(self) -> int | None:
        with connect_to_sglang(self._url) as connection:
            return reported_version(connection.get("/model_info"))

    def check(self) -> str:
        with connect_to_sglang(self._url) as connection:
            return f"SGLang {read_setup(connection, public_url(self._url).rstrip('/')).version}"

    def forget_version(self) -> None:
        call = set_version("unknown")
        with connect_to_sglang(self._url) as connection:
            connection.post(call.path, call.body)
