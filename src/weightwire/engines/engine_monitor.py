"""What is known about each engine: the results of its updates, and of a check every second.

A check notices an engine that hangs, sleeps or was restarted, also while no version arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weightwire.engines.engine import CheckedEngine, Engine, EngineHealth, asleep, not_verified
from weightwire.errors import EngineError, EngineGone, WeightwireError
from weightwire.system import Closeable
from weightwire.telemetry import Event, Listener, warning

__all__ = ["BUG", "EngineMonitor", "EngineStatus"]

BUG = "this is a bug in weightwire or in the package of the engine: report it"

_EVERY = 1.0  # seconds from one check to the next
_LONG_PAUSE = 2.0  # seconds from which on a pause for an update counts


@dataclass(frozen=True)
class EngineStatus:
    """What an engine serves. `trouble` is what keeps it from serving, or from getting newer versions."""

    name: str
    version: int | None = None  # None: it serves none, or that is not known
    pause_seconds: float | None = None  # of its last update
    trouble: str = ""
    paused_for: float = 0.0  # seconds; of an update that has not ended


@dataclass
class _EngineRecord:
    version: int | None = None
    pause_seconds: float | None = None
    update_problem: WeightwireError | None = None
    health_problem: WeightwireError | None = None
    is_asleep: bool = False
    must_verify: bool = False  # its weights may have changed without an update
    is_working: bool = False  # an update is in progress
    paused_since: float | None = None
    checking: threading.Lock = field(default_factory=threading.Lock)

    def problems(self) -> list[WeightwireError]:
        both = [one for one in (self.health_problem, self.update_problem) if one is not None]
        # The same problem twice if nothing answers.
        return both[:1] if len({one.message for one in both}) == 1 or _all_gone(both) else both


class EngineMonitor(Closeable):
    """The keeper reports its work with `begin` and `end`. `start` begins to check the engines that can be checked.

    Each problem is reported once, and its end as well. `on_change` is called after a check that found something new.
    """

    def __init__(self, engines: Sequence[Engine], emit: Listener, on_change: Callable[[], None]) -> None:
        self.version: int | None = None  # of the last update, for events
        self._engines = engines
        self._emit = emit
        self._on_change = on_change
        self._records = {engine.name: _EngineRecord() for engine in engines}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if not self._threads:
            checked = [engine for engine in self._engines if isinstance(engine, CheckedEngine)]
            self._threads = [
                threading.Thread(target=self._watch, args=(one,), name="weightwire-check", daemon=True)
                for one in checked
            ]
            for thread in self._threads:
                thread.start()

    def check_now(self) -> None:
        """Checks all engines that can be checked, one after the other."""
        for engine in self._engines:
            if isinstance(engine, CheckedEngine):
                with self._records[engine.name].checking:
                    self._check(engine)

    def close(self) -> None:
        """Close the engines afterwards, which ends checks that still wait for an answer."""
        self._closing.set()

    # --- what is known -------------------------------------------------------------------------------------------

    def statuses(self) -> tuple[EngineStatus, ...]:
        with self._lock:
            return tuple(_status(name, record) for name, record in self._records.items())

    def first_problem(self) -> WeightwireError | None:
        with self._lock:
            return next((one for record in self._records.values() for one in record.problems()), None)

    def is_gone(self, engine: Engine) -> bool:
        """Whether the engine did not answer the last check."""
        return isinstance(self._records[engine.name].health_problem, EngineGone)

    def can_be_updated(self, engine: Engine) -> bool:
        return not self.is_gone(engine) and not self._records[engine.name].is_asleep

    def must_verify(self, engine: Engine) -> bool:
        """Whether the engine slept, so that its weights may be others than it says."""
        return self._records[engine.name].must_verify

    def needs_update(self, engine: Engine, version: int) -> bool:
        """Whether the engine does not serve `version`, or is not checked, so that nobody knows."""
        record = self._records[engine.name]
        is_checked = bool(self._threads) and isinstance(engine, CheckedEngine)
        is_behind = record.version is None or record.version < version
        return not is_checked or is_behind or record.must_verify or record.update_problem is not None

    # --- updates -------------------------------------------------------------------------------------------------

    def begin(self, engine: Engine) -> None:
        with self._lock:
            self._records[engine.name].is_working = True

    def end(self, engine: Engine, version: int | None, problem: WeightwireError | None) -> None:
        """`version` is what the engine serves now. `problem`: why that is not the version of the update."""
        record = self._records[engine.name]
        with self._lock:
            before = record.problems()
            record.is_working, record.paused_since = False, None
            record.version = version
            record.update_problem = problem
            if problem is None:
                record.must_verify = record.is_asleep
                # Only an engine that serves a version has surely answered. A first contact may have failed.
                if version is not None and not record.is_asleep:
                    record.health_problem = None
        self._tell(engine.name, record, before)

    def note(self, engine: Engine, problem: WeightwireError) -> None:
        """Notes a problem of an update that is still in progress, unless there is one already."""
        record = self._records[engine.name]
        with self._lock:
            before = record.problems()
            if not before:
                record.update_problem = problem
        self._tell(engine.name, record, before)

    def note_pause(self, engine: Engine, seconds: float) -> None:
        self._records[engine.name].pause_seconds = seconds

    def _tell(self, name: str, record: _EngineRecord, before: list[WeightwireError]) -> bool:
        """Emits an event for each new problem, or for the end of all. Returns whether there was any."""
        known, now = {one.message for one in before}, record.problems()
        new = [one for one in now if one.message not in known]
        for problem in new:
            self._emit(warning(str(problem), self.version, at=time.time()))
        if before and not now:
            self._emit(Event("recovered", self.version, message=f"recovered: {name}"))
        return bool(new) or bool(before and not now)

    # --- checks --------------------------------------------------------------------------------------------------

    def _watch(self, engine: CheckedEngine) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            with self._records[engine.name].checking:
                self._check(engine)
            self._closing.wait(max(0.05, _EVERY - (time.monotonic() - began)))

    def _check(self, engine: CheckedEngine) -> None:
        record, began = self._records[engine.name], time.monotonic()
        version, was_working = record.version, record.is_working
        problem: WeightwireError | None = None
        health = EngineHealth()
        try:
            health = engine.check_health()
        except WeightwireError as raised:
            problem = raised
        except Exception as raised:  # a bug in an engine
            problem = EngineError(f"{engine.name}: {type(raised).__name__}: {raised}", hint=BUG)
        if self._closing.is_set():  # a closed connection proves nothing
            return
        with self._lock:
            before = record.problems()
            is_idle = not was_working and not record.is_working and record.version == version
            if problem is not None:
                record.health_problem = problem
            elif health.is_asleep or health.is_stuck or health.is_paused:
                _note_silence(engine.name, record, health, is_idle, began)
            else:
                _note_service(engine.name, record, health, is_idle)
        if self._tell(engine.name, record, before):
            self._on_change()


def _note_silence(name: str, record: _EngineRecord, health: EngineHealth, is_idle: bool, began: float) -> None:
    """The engine answers, but generates nothing. During an update, that is its pause."""
    record.health_problem = None
    record.paused_since = record.paused_since or began
    if is_idle and health.is_asleep:
        record.is_asleep = record.must_verify = True
        record.health_problem = asleep(name)
    elif is_idle and health.is_stuck:
        record.health_problem = EngineGone(
            f"{name}: its workers do not answer", hint="it hangs, or is overloaded: see its log"
        )


def _note_service(name: str, record: _EngineRecord, health: EngineHealth, is_idle: bool) -> None:
    record.health_problem = record.paused_since = None
    if record.is_asleep:
        record.is_asleep = False
        record.update_problem = not_verified(name)
    if is_idle and record.version is not None and health.version != record.version:
        record.update_problem = EngineError(
            f"{name}: does not report version {record.version} any more",
            hint="it was restarted, or another program loads weights: it is updated again",
        )
        record.version = None


def _status(name: str, record: _EngineRecord) -> EngineStatus:
    trouble = "; ".join(one.message for one in record.problems())
    paused = 0.0 if record.paused_since is None else time.monotonic() - record.paused_since
    return EngineStatus(name, record.version, record.pause_seconds, trouble, paused if paused > _LONG_PAUSE else 0.0)


def _all_gone(problems: Sequence[WeightwireError]) -> bool:
    return bool(problems) and all(isinstance(one, EngineGone) for one in problems)
