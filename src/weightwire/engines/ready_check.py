"""Whether a follower and its engines are ready: each engine serves a version that is new enough, without trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weightwire.engines.engine_monitor import EngineStatus
from weightwire.engines.version_keeper import Keeper
from weightwire.follower import Follower
from weightwire.telemetry import Event

__all__ = ["EngineState", "ReadyCheck", "ReadyLimits", "ReplicaState"]

_MOST = 1000  # discovered versions that are remembered


@dataclass(frozen=True)
class ReadyLimits:
    """How far an engine may be behind the newest version, in versions and in seconds. None: any distance."""

    max_behind: int | None = None
    max_lag: float | None = None


@dataclass(frozen=True)
class EngineState:
    """What an engine serves. `reasons` says why it is not ready."""

    name: str
    version: int | None
    behind: int | None  # versions; None if it serves none
    behind_seconds: float  # for how long it has not served the newest version
    pause_seconds: float | None  # of its last update
    trouble: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ReplicaState:
    """The replica and its engines. Without engines, `behind` and `reasons` are about the replica itself."""

    version: int | None
    head: int | None
    behind: int | None
    behind_seconds: float
    trouble: str
    reasons: tuple[str, ...]
    engines: tuple[EngineState, ...]

    @property
    def is_ready(self) -> bool:
        return not self.reasons


class ReadyCheck:
    """Pass it the follower's events. `state` may be called from any thread."""

    def __init__(self, limits: ReadyLimits) -> None:
        self._limits = limits
        self._began = time.monotonic()
        self._discovered: list[tuple[int, float]] = []  # versions, and when they were discovered
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.stage == "discover" and event.version is not None:
            with self._lock:
                self._discovered.append((event.version, time.monotonic()))
                del self._discovered[:-_MOST]

    def state(self, follower: Follower, keeper: Keeper | None) -> ReplicaState:
        version, head = follower.version, follower.head
        statuses = keeper.statuses() if keeper else ()
        own = [EngineStatus("this replica", version)] if not statuses else []
        self._forget(served for served in [version, *(one.version for one in statuses)] if served is not None)
        judged = [self._judge(one, head, follower.outage) for one in statuses or own]
        missing = ("this replica holds no version yet",) if version is None and statuses else ()
        return ReplicaState(
            version,
            None if head < 0 else head,
            None if any(one.behind is None for one in judged) else max(one.behind or 0 for one in judged),
            max(one.behind_seconds for one in judged),
            "; ".join(filter(None, (follower.trouble, keeper.trouble if keeper else ""))),
            (*missing, *(reason for one in judged for reason in one.reasons)),
            tuple(judged) if statuses else (),
        )

    def _forget(self, served: Iterable[int]) -> None:
        """Forgets when versions were discovered that every engine serves by now."""
        lowest = min(served, default=-1)
        with self._lock:
            self._discovered = [one for one in self._discovered if one[0] > lowest]

    def _judge(self, status: EngineStatus, head: int, outage: float) -> EngineState:
        served = status.version
        behind = None if served is None else max(0, head - served)
        lag = max(outage, self._lag(served))
        reasons = tuple(self._reasons(status, behind, lag))
        return EngineState(status.name, served, behind, round(lag, 3), status.pause_seconds, status.trouble, reasons)

    def _reasons(self, status: EngineStatus, behind: int | None, lag: float) -> Iterator[str]:
        most, longest = self._limits.max_behind, self._limits.max_lag
        if status.trouble:
            yield status.trouble
        if behind is None:
            yield f"{status.name}: no version of this run yet"
        elif most is not None and behind > most:
            yield f"{status.name}: {behind} version{'' if behind == 1 else 's'} behind; {most} are allowed"
        if longest is not None and lag > longest:
            yield f"{status.name}: behind for {lag:.1f} s; {longest:g} s are allowed"
        if status.paused_for:
            yield f"{status.name}: paused for {status.paused_for:.0f} s by an update"

    def _lag(self, served: int | None) -> float:
        """Seconds since the first version that it does not serve was discovered."""
        now = time.monotonic()
        if served is None:
            return now - self._began
        with self._lock:
            return next((now - at for version, at in self._discovered if version > served), 0.0)
