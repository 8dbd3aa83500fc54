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
from weightwire.engines.engine import CheckedEngine, Engine, ServedVersion, Swap
from weightwire.engines.engine_monitor import BUG, EngineMonitor, EngineStatus
from weightwire.errors import EngineError, EngineGone, WeightwireError
from weightwire.follower import Follower, Update
from weightwire.replica import CheckpointAbout
from weightwire.system import Closeable
from weightwire.telemetry import Event, Listener, careful, log_event, warning

__all__ = ["Keeper"]

_RETRY_AFTER = 2.0  # seconds
_LONGEST = 10.0  # seconds to wait for an engine before the others continue without it
_LOOK = 0.1  # seconds within which an engine that turns out to hang stops delaying others

_EngineStages = dict[str, StageTiming]


class Keeper(Closeable):
    """Call `bring` for every update of the follower, and `retry_failed` now and then for engines that were restarted.

    `connect` contacts the engines before the first update, and checks every second whether they still serve.
    `with Keeper(follower, engines):` does all of this in the background.
    """

    def __init__(self, follower: Follower, engines: Sequence[Engine], *, on_event: Listener = log_event) -> None:
        self.engines = tuple(engines)
        self._follower = follower
        self._emit = careful(on_event)
        self._monitor = EngineMonitor(self.engines, self._emit, self._report_served)
        self._at: int | None = None  # the version of the last update
        self._retried = 0.0
        # One thread for each: what waits for an engine that hangs occupies no other.
        self._threads = {engine.name: ThreadPoolExecutor(1, "weightwire-engine") for engine in self.engines}
        self._busy: dict[str, Future[_EngineStages]] = {}  # engines that are still at work
        self._refusal: EngineError | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if self.engines:
            follower.report_served(None)  # engines, but none serves a version yet

    @property
    def served(self) -> int | None:
        """The lowest version that any engine serves, or None if one serves none."""
        versions = [status.version for status in self.statuses()]
        return None if None in versions else min((one for one in versions if one is not None), default=None)

    @property
    def trouble(self) -> str:
        """The current errors of engines, or an empty string."""
        return "; ".join(status.trouble for status in self.statuses() if status.trouble)

    def statuses(self) -> tuple[EngineStatus, ...]:
        """What each engine serves, and its trouble."""
        return self._monitor.statuses()

    def connect(self) -> None:
        """Contacts the engines in the background, and starts to check them. One that hangs delays nothing."""
        self._monitor.start()
        for engine in self.engines:
            self._submit(engine, self._attach_first)

    def check_accepted(self) -> None:
        """Raises if an engine answered `connect` that it cannot be updated at all."""
        if self._refusal is not None:
            raise self._refusal

    def bring(self, update: Update, *, timeout: float | None = None) -> None:
        """Brings all engines to the follower's version. Reports failures, which `retry_failed` retries.

        Waits for slow engines, by default for 10 seconds, but not for an engine that does not answer.
        """
        began, self._at = self._at, update.version
        self._monitor.version = update.version
        position = self._follower.replica.position
        if position is None:  # the replica was lost: the next update has no patch
            return
        target = ServedVersion(position.run, update.version, update.state)
        self._each(self.engines, lambda engine: self._advance(engine, update, began, target), timeout or _LONGEST)

    def check_served(self, version: int) -> None:
        """Raises if an engine does not serve this version. Asks engines that can be asked."""
        if self._monitor.first_problem() is None:
            self._monitor.check_now()
        if (problem := self._monitor.first_problem()) is not None:
            raise problem
        for status in self.statuses():
            if status.version != version:
                raise EngineError(
                    f"{status.name}: serves {_named(status.version)}, not version {version}",
                    hint="run this command again, and see the engine's log",
                )

    def retry_failed(self) -> None:
        """Retries engines that were gone, failed or restarted."""
        if time.monotonic() - self._retried < _RETRY_AFTER or self._at is None:
            return
        self._retried = time.monotonic()
        at = self._at
        self._each([engine for engine in self.engines if self._monitor.needs_update(engine, at)], self._retry, _LONGEST)

    def _each(self, engines: Sequence[Engine], work: Callable[[Engine], _EngineStages], timeout: float) -> None:
        free = [one for one in engines if one.name not in self._busy and self._monitor.can_be_updated(one)]
        started = {engine.name: self._submit(engine, work) for engine in free}
        self._busy.update(started)
        self._wait(timeout)
        self._busy = {name: one for name, one in self._busy.items() if not one.done()}
        for engine in self.engines:
            if engine.name in self._busy:
                busy = EngineError(f"{engine.name}: still busy with an earlier version", hint="see the engine's log")
                self._monitor.note(engine, busy)
        # An engine that finishes after this round is not reported: its times belong to an older version.
        finished = [one.result() for name, one in started.items() if name not in self._busy]
        self._report_served(_slowest(finished))

    def _submit(self, engine: Engine, work: Callable[[Engine], _EngineStages]) -> Future[_EngineStages]:
        return self._threads[engine.name].submit(self._carefully, engine, work)

    def _wait(self, timeout: float) -> None:
        """Waits for engines that are at work, except for those that do not answer."""
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            answering = [one.name for one in self.engines if not self._monitor.is_gone(one)]
            running = [one for name, one in self._busy.items() if name in answering and not one.done()]
            if not running:
                return
            wait(running, timeout=min(left, _LOOK))

    def _report_served(self, stages: _EngineStages | None = None) -> None:
        """For the next heartbeat."""
        self._follower.report_served(self.served, self.trouble, stages)

    def _carefully(self, engine: Engine, work: Callable[[Engine], _EngineStages]) -> _EngineStages:
        stages: _EngineStages = {}
        problem: WeightwireError | None = None
        self._monitor.begin(engine)
        try:
            stages = work(engine)
        except WeightwireError as raised:
            problem = raised
        except Exception as raised:  # a bug in one engine must not stop the others
            problem = EngineError(f"{engine.name}: {type(raised).__name__}: {raised}", hint=BUG)
        self._monitor.end(engine, self._served_by(engine), problem)
        return stages

    def _served_by(self, engine: Engine) -> int | None:
        held, position = engine.holding, self._follower.replica.position
        return held.version if held and position and held.run == position.run else None  # not of another run

    # --- one engine ----------------------------------------------------------------------------------------------

    def _attach_first(self, engine: Engine) -> _EngineStages:
        try:
            engine.attach()
        except EngineGone:  # it may still be starting
            if not isinstance(engine, CheckedEngine):  # a check tells when it is there
                raise
        except EngineError as problem:
            self._refusal = problem
        return {}

    def _advance(self, engine: Engine, update: Update, began: int | None, target: ServedVersion) -> _EngineStages:
        if self._monitor.must_verify(engine):
            return self._reload(engine)
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
        failed = engine.holding is None or self._monitor.must_verify(engine)
        position = self._follower.replica.position
        held = engine.attach(position.run if position else "")
        behind = held is None or position is None or held.run != position.run or held.version < (self._at or 0)
        return self._reload(engine) if failed or behind else {}

    def _reload(self, engine: Engine) -> _EngineStages:
        # Borrowed: it must stay while it is loaded, even if others get a newer one.
        with self._follower.borrow_checkpoint() as checkpoint:
            target = _version_of(checkpoint)
            held = engine.holding or engine.attach(target.run)
            if self._monitor.must_verify(engine):
                held = None  # compare all weights
            if held == target or (held is None and engine.adopt(checkpoint, target)):
                return {}
            swap = engine.reload(checkpoint, target)
        return self._report(engine, target.version, swap, 0)

    def _report(self, engine: Engine, version: int, swap: Swap, nbytes: int) -> _EngineStages:
        stages = {
            "stage": StageTiming.of(swap.staged, nbytes, swap.at - swap.paused),
            "swap": StageTiming.of(swap.paused, nbytes, swap.at),
        }
        self._monitor.note_pause(engine, swap.paused)
        self._emit(Event("stage", version, nbytes, swap.staged, swap.at, engine.name))
        self._emit(Event("swap", version, nbytes, swap.paused, swap.at, engine.name))
        return stages

    def _warn(self, message: str) -> None:
        self._emit(warning(message, self._at, at=time.time()))

    # --- in the background ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts following in a background thread."""
        if self._thread is None:
            self.connect()
            self._thread = threading.Thread(target=self._run, name="weightwire-keeper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Disconnects from the engines, which keep serving. Does not close the follower."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._wait(_LONGEST)
        self._monitor.close()
        for engine in self.engines:
            engine.close()  # also ends calls that still wait for an answer
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)

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


def _named(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"
