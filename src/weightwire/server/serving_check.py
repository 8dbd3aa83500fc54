"""Whether the server may get traffic: it serves a version of the run that is new enough."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from weightwire.engines import Keeper
from weightwire.follower import Follower, Update

__all__ = ["ServingCheck", "ServingLimits"]


@dataclass(frozen=True)
class ServingLimits:
    """How old the served version may be. None: no limit.

    - `max_behind`: versions between it and the newest.
    - `max_lag`: seconds for which it has not been the newest, or for which the bucket could not be read.
    - `max_age`: seconds since its commit, by the publisher's clock.
    """

    max_behind: int | None = None
    max_lag: float | None = None
    max_age: float | None = None


class ServingCheck:
    """Call `note` for every update, before the engine gets it, and `refresh` several times a second.

    `look` may be called from any thread.
    """

    def __init__(self, follower: Follower, keeper: Keeper, limits: ServingLimits) -> None:
        self._follower = follower
        self._keeper = keeper
        self._limits = limits
        self._commits: dict[int, float] = {}  # times by version
        self._current = monotonic()  # when the newest version was served last

    def note(self, update: Update) -> None:
        served = self._keeper.served
        self._commits = {version: at for version, at in self._commits.items() if version == served}
        self._commits[update.version] = update.time

    def refresh(self) -> None:
        """Notes whether the newest version is served now."""
        self._lag(self._keeper.served)

    def look(self) -> dict[str, Any]:
        """The state of the server; `reason` is None if it is ready."""
        served, head = self._keeper.served, self._follower.head
        state: dict[str, Any] = {"version": served, "head": None if head < 0 else head}
        state["behind"] = None if served is None else max(0, head - served)
        state["behind_seconds"] = self._lag(served)
        state["age_seconds"] = None if served is None else self._age(served)
        reason = self._reason(state["behind"], state["behind_seconds"], state["age_seconds"])
        return {"ready": reason is None, "reason": reason, **state}

    def _lag(self, served: int | None) -> float:
        now = monotonic()
        if served is not None and served >= self._follower.head and not self._follower.trouble:
            self._current = now
        return round(now - self._current, 3)

    def _age(self, served: int) -> float:
        now = time()
        # A reload may serve a version that was not noted.
        return round(max(0.0, now - self._commits.setdefault(served, now)), 3)

    def _reason(self, behind: int | None, lag: float, age: float | None) -> str | None:
        limits = self._limits
        if self._keeper.trouble:  # without the message: a load balancer needs no token to read this
            return "the model could not take a version: see the output of the server"
        if behind is None or age is None:
            return "no version of the run is served yet"
        if limits.max_behind is not None and behind > limits.max_behind:
            return f"{behind} versions behind the newest; at most {limits.max_behind} are allowed"
        if limits.max_lag is not None and lag > limits.max_lag:
            return f"behind the newest version for {lag:.0f} s; at most {limits.max_lag:g} s are allowed"
        if limits.max_age is not None and age > limits.max_age:
            return f"the served version was committed {age:.0f} s ago; at most {limits.max_age:g} s are allowed"
        return None
