"""vLLM's update sessions, which carry orders to its workers. A server has one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from weightwire.engines.engine import asleep
from weightwire.engines.orders import Order
from weightwire.engines.server_connection import QUICK, ServerConnection, ServerRefusal
from weightwire.engines.shared_directory import SharedDirectory
from weightwire.engines.vllm.connection import START
from weightwire.engines.vllm.health_check import is_asleep
from weightwire.errors import EngineError

__all__ = ["send_order", "update_session"]

_STATUS = ("directory", "token", "model")


def send_order(server: ServerConnection, name: str, order: Order, timeout: float) -> None:
    """All orders but "status" need a session."""
    fields = asdict(order)
    if order.action != "status":
        server.post("/update_weights", {"update_info": fields}, timeout)
        return
    try:
        server.post("/init_weight_transfer_engine", {"init_info": {key: fields[key] for key in _STATUS}}, timeout)
    except ServerRefusal as problem:
        raise EngineError(
            f"{name}: does not serve with the weightwire backend ({problem.message})", hint=START
        ) from problem


@contextmanager
def update_session(server: ServerConnection, name: str, shared: SharedDirectory) -> Iterator[Callable[[str], None]]:
    """Yields `finish`, to be called with the version that the server reports from then on; empty to keep it."""
    finished = False

    def finish(version: str) -> None:
        nonlocal finished
        server.post("/finish_weight_update", {"weight_version": version} if version else {})
        finished = True

    with shared.session():
        if not shared.paused_mark.exists() and is_asleep(server, QUICK):
            raise asleep(name)  # its weights may not be in memory
        try:
            server.post("/start_weight_update", {})
        except ServerRefusal:  # a killed follower left an update open
            with suppress(ServerRefusal):
                server.post("/finish_weight_update", {})
            server.post("/start_weight_update", {})
        try:
            yield finish
        finally:
            if not finished:
                with suppress(EngineError):
                    server.post("/finish_weight_update", {})
