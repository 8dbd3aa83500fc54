"""How often a follower polls: at the times when versions are expected, and rarely while none come or polls fail."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from weightwire.bucket import Bucket
from weightwire.chain import FENCE, Commit
from weightwire.follower.arrival_forecast import ArrivalForecast
from weightwire.system import Runtime

__all__ = ["Polling"]

_SLOWEST = 30.0  # seconds between two looks
_SOONEST = 0.25, 0.5  # how soon after a look a wake-up may start the next: in poll intervals, in seconds
_PATIENCE = 5.0  # seconds that a wake-up leaves of the wait after a failure
_JITTER = 0.75, 1.25  # keeps followers out of step
_CLOSE = 12  # looks per period, around the time when a version is expected


class Polling:
    """Call `begin_look` before each look and `observe` for each version reached.

    `sleep` waits until the next look is due or `wake` is called.

    Anyone who reaches the server of `--listen` may call `wake`, at any rate. All calls during a sleep or a look count
    as one, and the pause after a look has a lower limit, which is longer after a failure.
    """

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._woken = asyncio.Event()
        self._last_new = runtime.clock()
        self._last_time: float | None = None  # of the newest commit
        self._period = 0.0  # seconds between versions, lately
        self._forecast = ArrivalForecast()
        self._asked_at: float | None = None  # when the current look began; None once it has found a version

    def wake(self) -> None:
        """Ends the current sleep, or the next one."""
        self._woken.set()

    def begin_look(self) -> None:
        self._asked_at = self._runtime.clock()

    def observe(self, commit: Commit) -> None:
        """Learns how often versions come, by the publisher's clock, and when."""
        self._last_new = now = self._runtime.clock()
        # Later versions may have been committed while the first was applied.
        asked_at, self._asked_at = now if self._asked_at is None else self._asked_at, None
        before, self._last_time = self._last_time, commit.time
        if commit.kind == FENCE:
            return
        self._forecast.observe(commit.time, asked_at)
        if before is not None and commit.time > before:
            self._period = 0.5 * (self._period or commit.time - before) + 0.5 * (commit.time - before)

    async def sleep(self, failures: int) -> None:
        """Waits until the next look is due. `failures` is the number of looks in a row that failed."""
        seconds = self._seconds(failures) if failures else self._until_expected()
        least = min(seconds, _PATIENCE if failures else min(self._bucket.poll_interval * _SOONEST[0], _SOONEST[1]))
        await asyncio.sleep(least)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds - least):
                await self._woken.wait()
        self._woken.clear()

    def _until_expected(self) -> float:
        """One look halfway, then looks in short steps around the expected time, until the version is overdue."""
        now, due, fastest = self._runtime.clock(), self._forecast.expected, self._bucket.poll_interval
        period, random = self._forecast.period, self._runtime.random.random
        if due is None or period < 5 * fastest:
            return self._seconds(0)
        step = max(period / _CLOSE, fastest)
        reach = max(2 * self._forecast.deviation, 0.8 * step)
        if now >= due + reach + 2 * step:
            return self._seconds(0)
        if now >= due:
            return step * (0.9 + 0.2 * random())
        until_begin = due - reach - now
        if until_begin > 0.1 * step:
            looks = math.ceil(until_begin / min(period / 2, _SLOWEST * _JITTER[1]))
            return max(until_begin / looks * (0.9 + 0.1 * random() if looks > 1 else 1), fastest)
        # The last of these looks is just after the expected time. Different moments keep followers out of step.
        until_due = due + 0.15 * step * random() - now
        looks = max(1, round(until_due / step)) if reach > 0.8 * step else 1
        return max(until_due / looks, 0.75 * fastest)

    def _seconds(self, failures: int) -> float:
        """A fifth of the time between versions, and less often the longer none has come."""
        fastest = self._bucket.poll_interval
        idle = self._runtime.clock() - self._last_new
        seconds = max(self._period / 5, idle / 50, fastest)
        jitter = self._runtime.random.uniform(*_JITTER)
        return min(seconds * 2.0 ** min(failures, 10), max(_SLOWEST, fastest)) * jitter
