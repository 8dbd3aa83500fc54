"""The follower's side of vLLM: sends orders over HTTP, and passes patches through shared memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

from weightwire.delta import Delta
from weightwire.engines.engine import CachePolicy, EngineHealth, ServedVersion, Swap, not_verified
from weightwire.engines.orders import Order
from weightwire.engines.server_connection import NotOffered, ServerRefusal
from weightwire.engines.shared_directory import SharedDirectory
from weightwire.engines.vllm.connection import connect_to_vllm
from weightwire.engines.vllm.health_check import VllmHealthCheck
from weightwire.engines.vllm.sleep_mark import SLEPT
from weightwire.engines.vllm.update_session import send_order, update_session
from weightwire.engines.worker_orders import LONG, WorkerOrders
from weightwire.errors import EngineError, public_url

__all__ = ["VllmEngine"]


class VllmEngine:
    """A vLLM server at a URL. It must run on this machine, because patches are passed as files.

    Only one follower may update it at a time. A file beside the patches marks that the server is paused, so that a
    restarted follower can resume it.

    With `cache="keep"`, requests that run during a patch keep their KV cache. A reload always clears it.
    """

    def __init__(self, url: str, *, cache: CachePolicy = "flush") -> None:
        if cache not in get_args(CachePolicy):
            raise EngineError(f"unknown cache policy {cache!r}", hint="use 'flush' or 'keep'")
        self._keeps_cache = cache == "keep"
        self.name = public_url(url).rstrip("/")
        self._server, self._pausing = connect_to_vllm(url), connect_to_vllm(url)
        self._replicas = 0
        self._shared = SharedDirectory.for_port(self._server.port, self.name)
        self._orders = WorkerOrders(self.name, self._shared.path, self._send, lambda: self._server.check_alive())
        self._health = VllmHealthCheck(url)

    @property
    def holding(self) -> ServedVersion | None:
        return self._orders.holding

    @property
    def unpatchable(self) -> str:
        """Why it cannot be patched in place, or empty."""
        return self._orders.unpatchable

    @property
    def can_patch(self) -> bool:
        return not self.unpatchable

    # --- the engine ----------------------------------------------------------------------------------------------

    def attach(self, run: str = "") -> ServedVersion | None:
        orders = self._orders
        orders.holding = None
        self._shared.lock()
        served = self._reported_version()
        orders.workers = int(self._server.get("/get_world_size").get("world_size", 1))
        one = int(self._server.get("/get_world_size?include_dp=false").get("world_size", orders.workers))
        self._replicas = orders.workers // max(1, one)
        orders.status()
        if served == SLEPT:  # the workers do not know whether their weights are still there
            orders.holding = None
        if orders.holding is not None and orders.holding.run == run and served != str(orders.holding.version):
            # The follower that swapped it in died before it could report the version.
            self._server.post("/update_weight_version", {"new_version": str(orders.holding.version)})
        if not orders.mixed:
            self._resume_if_left_paused()
        self._check_cache_policy()
        return orders.holding

    def check_health(self) -> EngineHealth:
        health = self._health.check()
        if health.is_asleep and self._shared.paused_mark.exists():
            return EngineHealth(is_paused=True)
        return health

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        with self._session() as finish:
            answers = self._orders.order("adopt", checkpoint, target, LONG)
            self._orders.check(answers)
            if not all(answer.done for answer in answers):
                return False
            self._orders.check_holding(target)
            finish(str(target.version))
            return True

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        if self._reported_version() == SLEPT:  # the patch would hide it
            self._orders.holding = None
            raise not_verified(self.name)
        with self._shared.staged(patch, target.version) as file, self._session() as finish:
            self._orders.check(self._orders.order("stage", file, target, LONG))
            ready = time.perf_counter()
            if not patch.entries:  # a fence: only the version changes
                self._orders.swap(target)
                finish(str(target.version))
                return Swap(ready - began, 0.0)
            with self._pause(keeps_cache=self._keeps_cache) as settled:
                self._orders.swap(target)
                settled()
                self._report(target)
            swap = Swap(ready - began, time.perf_counter() - ready)
            finish("")  # not in the pause: it frees the patch
            return swap

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        with self._session() as finish:
            self._orders.check(self._orders.order("check", checkpoint, target, LONG))
            ready = time.perf_counter()
            with self._pause() as settled:
                settled()
                self._orders.check(self._orders.order("reload", checkpoint, target, LONG))
                self._orders.check_holding(target)
                finish(str(target.version))
            return Swap(ready - began, time.perf_counter() - ready)

    def close(self) -> None:
        for connection in (self._server, self._pausing, self._health):
            connection.close()
        self._shared.close()

    def _check_cache_policy(self) -> None:
        if self._keeps_cache and self._orders.not_kept:
            self._orders.holding = None
            raise EngineError(
                f"{self.name}: cannot keep the KV cache of running requests: {self._orders.not_kept}",
                hint="use --cache flush",
            )

    # --- vLLM's ways ---------------------------------------------------------------------------------------------

    def _reported_version(self) -> Any:
        return self._server.get("/weight_info").get("weight_version")

    def _report(self, target: ServedVersion) -> None:
        """Lets the server report this version from now on."""
        with self._unless_it_fails():
            self._server.post("/update_weight_version", {"new_version": str(target.version)})

    @contextlib.contextmanager
    def _session(self) -> Iterator[Callable[[str], None]]:
        """Yields `finish`, to be called with the new version, or with nothing if that was reported."""
        with update_session(self._server, self.name, self._shared) as finish_session:

            def finish(version: str) -> None:
                with self._unless_it_fails():
                    finish_session(version)

            yield finish

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """What the workers hold counts only if the server could be told: otherwise `attach` tells it again."""
        known, self._orders.holding = self._orders.holding, None
        yield
        self._orders.holding = known

    def _send(self, order: Order, timeout: float) -> None:
        send_order(self._server, self.name, order, timeout)

    @contextlib.contextmanager
    def _pause(self, keeps_cache: bool = False) -> Iterator[Callable[[], object]]:
        """Pauses generation. Running requests continue afterwards; the prefix cache is cleared.

        With `keeps_cache`, running requests keep their KV cache. Otherwise they compute it again.

        Generation stops at once, and later orders run after the current step, but vLLM confirms the pause only after a
        while. Orders may be sent meanwhile. Call the yielded function to wait for the confirmation.
        """
        self._shared.paused_mark.touch()
        with ThreadPoolExecutor(1, thread_name_prefix="weightwire-pause") as pool:
            paused = pool.submit(self._stop_generation, keeps_cache)
            if self._replicas > 1:  # /is_paused covers only one of them
                paused.result()
            while not paused.done() and not self._server.get("/is_paused").get("is_paused"):
                pass
            try:
                if paused.done():
                    paused.result()
                yield partial(self._settle, paused)
            except BaseException:
                if not self._orders.mixed:  # otherwise it must not serve before a reload
                    self._settle(paused)
                    self._resume()
                raise
        self._resume()

    def _stop_generation(self, keeps_cache: bool) -> bool:
        """Returns whether the prefix cache is cleared."""
        if not keeps_cache:
            self._pausing.post("/pause?mode=keep", {}, LONG)
            return True
        self._pausing.post("/pause?mode=keep&clear_cache=false", {}, LONG)
        with contextlib.suppress(ServerRefusal, NotOffered):
            # The plugin makes this succeed while requests run.
            return self._pausing.post("/reset_prefix_cache", {}, LONG).get("success") is True
        return False

    def _settle(self, paused: Future[bool]) -> None:
        try:
            is_cleared = paused.result()
        except EngineError:
            is_cleared = False
        if not is_cleared:  # otherwise the prefix cache might hold values of old weights
            self._server.post("/pause?mode=keep", {}, LONG)

    def _resume(self) -> None:
        self._server.post("/resume", {})
        self._shared.paused_mark.unlink(missing_ok=True)

    def _resume_if_left_paused(self) -> None:
        """Resumes a server that a killed follower left paused."""
        if self._shared.paused_mark.exists():
            self._server.post("/pause?mode=keep", {}, LONG)  # a full pause clears the prefix cache
            self._resume()
