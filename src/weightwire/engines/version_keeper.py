"""Keeps any number of engines at the version of one follower.

An engine gets a patch if the patch covers its version, otherwise a reload from the replica. A lost engine is contacted
again, a failed one is reloaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

from weightwire.chain import StageTiming
from weightwire.engines.engine import Engine, ServedVersion, Swap
from weightwire.errors import EngineError, EngineGone, WeightwireError
from weightwire.follower import Follower, Update
from weightwire.replica import CheckpointAbout
from weightwire.system import Closeable
from weightwire.telemetry import Event, Listener, careful, log_event, warning

__all__ = ["Keeper"]

_RETRY_AFTER = 2.0  # seconds
_LONGEST = 10.0  # seconds to wait for an engine before the others continue without it

_EngineStages = dict[str, StageTiming]


class Keeper(Closeable):
    """Call `bring` for every update of the follower, and `retry_failed` now and then for engines that were restarted.

    `with Keeper(follower, engines):` does both in the background.
    """

    def __init__(self, follower: Follower, engines: Sequence[Engine], *, on_event: Listener = log_event) -> None:
        self.engines = tuple(engines)
        self._follower = follower
        self._emit = careful(on_event)
        self._at: int | None = None  # the version of the last update
        self._trouble: dict[str, str] = {}
        self._retried = 0.0
        self._pool = ThreadPoolExecutor(max(1, len(self.engines)), thread_name_prefix="weightwire-engine")
        self._busy: dict[str, Future[_EngineStages]] = {}  # engines that are still at work
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self.engines:
            follower.report_served(None)  # engines, but none serves a version yet

    @property
    def served(self) -> int | None:
        """The lowest version that any engine serves, or None if one serves none."""
        versions = [engine.holding.version if engine.holding else None for engine in self.engines]
        return None if None in versions else min((one for one in versions if one is not None), default=None)

    @property
    def trouble(self) -> str:
        """The current errors of engines, or an empty string."""
        return "; ".join(self._trouble.values())

    def bring(self, update: Update) -> None:
        """Brings all engines to the follower's version. Reports failures, which `retry_failed` retries."""
        began, self._at = self._at, update.version
        position = self._follower.replica.position
        if position is None:  # the replica was lost: the next update has no patch
            return
        target = ServedVersion(position.run, update.version, update.state)
        self._each(lambda engine: self._advance(engine, update, began, target))

    def retry_failed(self) -> None:
        """Retries engines that were gone, failed or restarted."""
        if time.monotonic() - self._retried < _RETRY_AFTER or self._at is None:
            return
        self._retried = time.monotonic()
        self._each(self._retry)

    def _each(self, work: Callable[[Engine], _EngineStages]) -> None:
        started = {
            engine.name: self._pool.submit(self._carefully, engine, work)
            for engine in self.engines
            if engine.name not in self._busy
        }
        self._busy.update(started)
        wait(self._busy.values(), timeout=_LONGEST)
        self._busy = {name: one for name, one in self._busy.items() if not one.done()}
        for name in self._busy:
            self._trouble.setdefault(name, f"{name}: still busy with an earlier version")
        # An engine that finishes after this round is not reported: its times belong to an older version.
        finished = [one.result() for name, one in started.items() if name not in self._busy]
        self._follower.report_served(self.served, self.trouble, _slowest(finished))

    def _carefully(self, engine: Engine, work: Callable[[Engine], _EngineStages]) -> _EngineStages:
        stages: _EngineStages = {}
        try:
            stages = work(engine)
        except WeightwireError as problem:
            self._note(engine, problem.message, str(problem))
        except Exception as problem:  # a bug in one engine must not stop the others
            message = f"{engine.name}: {type(problem).__name__}: {problem}"
            self._note(engine, message, message)
        else:
            if self._trouble.pop(engine.name, None):
                self._emit(Event("recovered", self._at, message=f"recovered: {engine.name}"))
        return stages

    def _note(self, engine: Engine, message: str, whole: str) -> None:
        if self._trouble.get(engine.name) != message:
            self._warn(whole)
        self._trouble[engine.name] = message

    # --- one engine ----------------------------------------------------------------------------------------------

    def _advance(self, engine: Engine, update: Update, began: int | None, target: ServedVersion) -> _EngineStages:
        held = engine.holding or engine.attach(target.run)
        if held == target:
            return {}
        # A patch has absolute values, so it fits every version that it spans.
        fits = (
            began is not None
            and held is not None
            and held.run == target.run
            and began <= held.version < target.version
            and engine.can_patch
        )
        patch = update.patch
        if patch is None or not fits:
            return self._reload(engine)
        try:
            return self._report(engine, target.version, engine.patch(patch, target), patch.nbytes)
        except EngineGone:
            raise
        except EngineError as problem:
            self._warn(f"{problem.message}; reloading all weights")
            return self._reload(engine)

    def _retry(self, engine: Engine) -> _EngineStages:
        failed = engine.holding is None and engine.name in self._trouble
        position = self._follower.replica.position
        held = engine.attach(position.run if position else "")
        behind = held is None or position is None or held.run != position.run or held.version < (self._at or 0)
        return self._reload(engine) if failed or behind else {}

    def _reload(self, engine: Engine) -> _EngineStages:
        # Borrowed: it must stay while it is loaded, even if others get a newer one.
        with self._follower.borrow_checkpoint() as checkpoint:
            target = _version_of(checkpoint)
            held = engine.holding or engine.attach(target.run)
            if held == target or (held is None and engine.adopt(checkpoint, target)):
                return {}
            swap = engine.reload(checkpoint, target)
        return self._report(engine, target.version, swap, 0)

    def _report(self, engine: Engine, version: int, swap: Swap, nbytes: int) -> _EngineStages:
        stages = {
            "stage": StageTiming.of(swap.staged, nbytes, swap.at - swap.paused),
            "swap": StageTiming.of(swap.paused, nbytes, swap.at),
        }
        self._emit(Event("stage", version, nbytes, swap.staged, swap.at, engine.name))
        self._emit(Event("swap", version, nbytes, swap.paused, swap.at, engine.name))
        return stages

    def _warn(self, message: str) -> None:
        self._emit(warning(message, self._at, at=time.time()))

    # --- in the background ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts following in a background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightwire-keeper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Disconnects from the engines, which keep serving. Does not close the follower."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        wait(self._busy.values(), timeout=_LONGEST)
        for engine in self.engines:
            engine.close()  # also ends calls that still wait for an answer
        self._pool.shutdown()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                for update in self._follower.watch(timeout=0.25):
                    self.bring(update)
                    if self._closing.is_set():
                        return
                self.retry_failed()
            except WeightwireError as problem:
                self._warn(str(problem))
                self._closing.wait(1.0)

    def __enter__(self) -> Self:
        self.start()
        return self


def _slowest(stages: Sequence[_EngineStages]) -> _EngineStages:
    """The longest time of each stage: the engines work in parallel."""
    names = dict.fromkeys(name for one in stages for name in one)
    return {name: max((one[name] for one in stages if name in one), key=lambda one: one.seconds) for name in names}


def _version_of(checkpoint: Path) -> ServedVersion:
    """The version in a checkpoint's weightwire.json."""
    about = CheckpointAbout.read(checkpoint)
    return ServedVersion(about.run, about.version, about.state)
