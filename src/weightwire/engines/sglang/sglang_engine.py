"""The follower's side of SGLang: sends orders over HTTP, and passes patches through shared memory.

SGLang answers an order only if nothing runs, so every order needs a pause. Orders that only read pause it for an
instant and then work while it generates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from weightwire.delta import Delta
from weightwire.engines.engine import EngineHealth, ServedVersion, Swap
from weightwire.engines.orders import Order
from weightwire.engines.server_connection import QUICK, NotOffered, ServerRefusal
from weightwire.engines.sglang import http_api
from weightwire.engines.sglang.http_api import Call
from weightwire.engines.sglang.order_payload import pack_order
from weightwire.engines.sglang.server_setup import connect_to_sglang, read_setup, reported_version
from weightwire.engines.shared_directory import SharedDirectory
from weightwire.engines.worker_orders import LONG, WorkerOrders
from weightwire.errors import EngineError, EngineGone, public_url

__all__ = ["SglangEngine"]

# Seconds, for a check. A batch may take that long. Together with the time between two checks, less than 5.
_FRONT_END, _SCHEDULER = 1.0, 2.5
_FLUSHING, _LOOK = 30.0, 0.1  # seconds


class SglangEngine:
    """An SGLang server at a URL. It must run on this machine, because patches are passed as files.

    Only one follower may update it at a time. A file beside the patches marks that the server is paused, so that a
    restarted follower can resume it.
    """

    def __init__(self, url: str) -> None:
        self.name = public_url(url).rstrip("/")
        self._server, self._health = connect_to_sglang(url), connect_to_sglang(url)
        self._shared = SharedDirectory.for_port(self._server.port, self.name)
        self._orders = WorkerOrders(self.name, self._shared.path, self._send, self._server.check_alive)
        self._is_paused = self._is_open = False  # by this follower; for an update
        self._has_sessions = True

    @property
    def holding(self) -> ServedVersion | None:
        return self._orders.holding

    @property
    def can_patch(self) -> bool:
        return not self._orders.unpatchable

    # --- the engine ----------------------------------------------------------------------------------------------

    def attach(self, run: str = "") -> ServedVersion | None:
        orders = self._orders
        orders.holding, self._has_sessions = None, True
        self._shared.lock()
        orders.workers = read_setup(self._server, self.name).ranks
        with self._pause("in_place"):
            orders.status()
        held = orders.holding
        if held is not None and held.run == run and self._reported() != held.version:
            self._report(held)  # the follower that swapped it in died before it could
        return held

    def check_health(self) -> EngineHealth:
        version = reported_version(self._health.get("/model_info", _FRONT_END))
        try:
            self._health.get("/server_info", _SCHEDULER)  # asks the scheduler, which answers nothing while it loads
        except EngineGone as problem:
            if not isinstance(problem.__cause__, TimeoutError):
                raise
            return EngineHealth(is_stuck=True)
        return EngineHealth(is_paused=True) if self._shared.paused_mark.exists() else EngineHealth(version)

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        answers = self._orders.order("adopt", checkpoint, target, LONG)
        self._orders.check(answers)
        if not all(answer.done for answer in answers):
            return False
        self._orders.check_holding(target)
        self._report(target)
        if self._shared.paused_mark.exists():  # it was a mixture before
            with self._pause("retract"):
                pass
        return True

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        with self._shared.staged(patch, target.version) as file:
            self._orders.check(self._orders.order("stage", file, target, LONG))
            ready = time.perf_counter()
            # A fence changes only the version: the cache stays valid.
            with self._pause("retract" if patch.entries else "in_place"):
                with self._session():
                    self._orders.swap(target)
                self._report(target)
        return Swap(ready - began, time.perf_counter() - ready)

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        began = time.perf_counter()
        self._orders.check(self._orders.order("check", checkpoint, target, LONG))
        ready = time.perf_counter()
        with self._pause("retract"):
            self._orders.check(self._orders.order("forget", checkpoint, target))
            self._orders.holding, self._orders.mixed = None, True  # until SGLang has loaded all of it
            self._post(http_api.load_checkpoint(checkpoint), LONG)
            self._orders.check(self._orders.order("reload", checkpoint, target, LONG))
            self._orders.check_holding(target)
            self._report(target)
        return Swap(ready - began, time.perf_counter() - ready)

    def close(self) -> None:
        self._server.close()
        self._health.close()
        self._shared.close()

    # --- SGLang's ways -------------------------------------------------------------------------------------------

    def _post(self, call: Call, timeout: float = QUICK) -> dict[str, Any]:
        return self._server.post(call.path, call.body, timeout)

    def _send(self, order: Order, timeout: float) -> None:
        if not self._is_paused:  # otherwise SGLang waits for the end of all requests
            with self._pause("in_place"):
                self._send(order, timeout)
        elif not self._is_open:
            with self._session():
                self._send(order, timeout)
        else:
            self._post(http_api.send_order(pack_order(order), self._orders.workers, self._has_sessions), timeout)

    def _reported(self) -> int | None:
        return reported_version(self._server.get("/model_info"))

    def _report(self, target: ServedVersion) -> None:
        """Reports the version to clients. If this fails, the next `attach` does it."""
        self._orders.holding = None
        self._post(http_api.set_version(str(target.version)))
        self._orders.holding = target

    @contextmanager
    def _pause(self, mode: Literal["in_place", "retract"]) -> Iterator[None]:
        """Pauses generation. Afterwards the server generates again, unless its weights may be a mixture.

        If the weights change, all running requests are retracted and the cache is flushed. Also if the server was left
        paused, perhaps by a follower that was killed: nobody knows what had changed by then.
        """
        was_paused = self._shared.paused_mark.exists()
        if was_paused:
            mode = "retract"
        self._shared.paused_mark.touch()
        self._is_paused = True
        try:
            self._post(http_api.pause(mode))
            yield
        except BaseException:
            if not self._orders.mixed and not was_paused:
                with suppress(EngineError):  # what failed first is the reason
                    self._resume(mode)
            raise
        finally:
            self._is_paused = False
        if not self._orders.mixed:
            self._resume(mode)

    def _resume(self, mode: Literal["in_place", "retract"]) -> None:
        """If this fails, the next `attach` does it."""
        known, self._orders.holding = self._orders.holding, None
        if mode == "retract":
            self._flush()
        self._post(http_api.CONTINUE)
        self._shared.paused_mark.unlink(missing_ok=True)
        self._orders.holding = known

    def _flush(self) -> None:
        """Empties the cache, which holds values of old weights. Before 0.5.21, SGLang refuses while requests wait."""
        try:
            self._post(http_api.FLUSH)
            return
        except ServerRefusal:
            self._post(http_api.pause("abort"), LONG)  # a wrong answer is worse than none
        until = time.monotonic() + _FLUSHING
        while True:  # requests may take a moment to end
            try:
                self._post(http_api.FLUSH)
                return
            except ServerRefusal:
                if time.monotonic() > until:
                    raise
            time.sleep(_LOOK)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Brackets an update, as SGLang wants it since 0.5.21."""
        self._open_session()
        self._is_open = True
        try:
            yield
        except BaseException:
            with suppress(EngineError):
                self._close_session()
            raise
        finally:
            self._is_open = False
        self._close_session()

    def _open_session(self) -> None:
        if not self._has_sessions:
            return
        try:
            self._post(http_api.BEGIN)
        except NotOffered:
            self._has_sessions = False
        except ServerRefusal:  # a killed follower left an update open
            self._post(http_api.END)
            self._post(http_api.BEGIN)

    def _close_session(self) -> None:
        if not self._has_sessions:
            return
        try:
            self._post(http_api.END)
        except EngineError:
            self._orders.holding, self._orders.mixed = None, True  # SGLang may have prepared some layers only
            raise
