"""Asks a vLLM server whether it serves, on a connection of its own: an update may occupy the other one for minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from weightwire.engines.engine import EngineHealth
from weightwire.engines.server_connection import NotOffered, ServerConnection
from weightwire.engines.vllm.connection import connect_to_vllm
from weightwire.errors import EngineError, EngineGone
from weightwire.system import Closeable

__all__ = ["VllmHealthCheck", "is_asleep"]

# Seconds. A step of the engine core may take that long. Together with the time between two checks, less than 5.
_CORE, _FRONT_END = 3.0, 0.5


def _weight_version(server: ServerConnection, timeout: float) -> int | None:
    text = server.get("/weight_info", timeout).get("weight_version")
    return int(text) if isinstance(text, str) and text.isdecimal() else None


class VllmHealthCheck(Closeable):
    """Call `check` from one thread at a time. `close` ends a call that waits.

    `read_version` asks the server for the version that it serves, within some seconds.
    """

    def __init__(
        self, url: str, read_version: Callable[[ServerConnection, float], int | None] = _weight_version
    ) -> None:
        self._server = connect_to_vllm(url)
        self._read_version = read_version

    def check(self) -> EngineHealth:
        until = time.monotonic() + _CORE
        try:
            if is_asleep(self._server, _CORE):
                return EngineHealth(is_asleep=True)
            version = self._read_version(self._server, max(0.1, until - time.monotonic()))
        except EngineGone as problem:
            if not isinstance(problem.__cause__, TimeoutError):
                raise
            # Both go to the engine core, which answers nothing while it loads weights.
            if not self._answers():
                raise
            return EngineHealth(is_stuck=True)
        return EngineHealth(version)

    def _answers(self) -> bool:
        """Whether the HTTP server answers, with whatever."""
        try:
            self._server.get("/health", _FRONT_END)
        except EngineGone:
            return False
        except EngineError:
            pass
        return True

    def close(self) -> None:
        self._server.close()


def is_asleep(server: ServerConnection, timeout: float) -> bool:
    """Whether the server is asleep or paused. Both look the same from outside."""
    with suppress(NotOffered):
        return bool(server.get("/is_sleeping", timeout).get("is_sleeping"))
    return False
