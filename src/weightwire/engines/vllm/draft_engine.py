"""The engine for a separate draft model of a vLLM server: a model of its own, whose weights follow a run of their own.

A draft predicts tokens, which the served model checks. It never changes what is sampled, only how fast. So the server
is not paused for it, and keeps its caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightwire.delta import Delta
from weightwire.engines.engine import EngineHealth, ServedVersion, Swap
from weightwire.engines.orders import Order
from weightwire.engines.server_connection import ServerConnection
from weightwire.engines.shared_directory import SharedDirectory
from weightwire.engines.vllm.connection import connect_to_vllm
from weightwire.engines.vllm.drafts import DRAFT
from weightwire.engines.vllm.health_check import VllmHealthCheck
from weightwire.engines.vllm.update_session import send_order, update_session
from weightwire.engines.worker_orders import LONG, WorkerOrders
from weightwire.errors import public_url

__all__ = ["VllmDraftEngine"]


class VllmDraftEngine:
    """The draft model of the server at a URL. Another follower may update the served model."""

    def __init__(self, url: str) -> None:
        self.name = f"{public_url(url).rstrip('/')},draft"
        self._server = connect_to_vllm(url)
        self._shared = SharedDirectory.for_port(self._server.port, self.name, DRAFT)
        self._orders = self._orders_through(lambda: self._server)
        self._health = VllmHealthCheck(url, self._read_version)

    def _orders_through(self, server: Callable[[], ServerConnection]) -> WorkerOrders:
        def send(order: Order, timeout: float) -> None:
            send_order(server(), self.name, order, timeout)

        return WorkerOrders(self.name, self._shared.path, send, lambda: server().check_alive(), model=DRAFT)

    @property
    def holding(self) -> ServedVersion | None:
        return self._orders.holding

    @property
    def can_patch(self) -> bool:
        return True

    def attach(self, run: str = "") -> ServedVersion | None:
        self._orders.holding = None
        self._shared.lock()
        self._orders.workers = int(self._server.get("/get_world_size").get("world_size", 1))
        self._orders.status()
        return self._orders.holding

    def check_health(self) -> EngineHealth:
        health = self._health.check()
        if health.is_asleep and self._shared.paused_mark.exists():  # for an update of the served model
            return EngineHealth(is_paused=True)
        return health

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        with self._session() as finish:
            answers = self._orders.order("adopt", checkpoint, target, LONG)
            self._orders.check(answers)
            if not all(answer.done for answer in answers):
                return False
            self._orders.check_holding(target)
            finish()
            return True

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        with self._shared.staged(patch, target.version) as file, self._session() as finish:
            self._orders.check(self._orders.order("stage", file, target, LONG))
            ready = time.perf_counter()
            self._orders.swap(target)  # between two steps of the workers
            swapped = time.perf_counter()
            finish()
            return Swap(ready - began, swapped - ready)

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        with self._session() as finish:
            self._orders.check(self._orders.order("check", checkpoint, target, LONG))
            ready = time.perf_counter()
            self._orders.check(self._orders.order("reload", checkpoint, target, LONG))
            self._orders.check_holding(target)
            loaded = time.perf_counter()
            finish()
            return Swap(ready - began, loaded - ready)

    def close(self) -> None:
        self._server.close()
        self._health.close()
        self._shared.close()

    @contextmanager
    def _session(self) -> Iterator[Callable[[], None]]:
        """The version that the server reports is that of the served model, and stays."""
        with update_session(self._server, self.name, self._shared) as finish:
            yield lambda: finish("")

    def _read_version(self, server: ServerConnection, timeout: float) -> int | None:
        """Asks the workers, because the server reports no version of a draft."""
        if not self._orders.workers:  # not attached yet
            return None
        orders = self._orders_through(lambda: server)
        orders.workers = self._orders.workers
        orders.status(timeout)
        return None if orders.holding is None else orders.holding.version
