"""How often a follower polls: often while versions arrive, rarely while none do or polls fail."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weightwire.bucket import Bucket
from weightwire.chain import FENCE, Commit
from weightwire.system import Runtime

__all__ = ["Polling"]

_SLOWEST = 30.0  # seconds between two looks
_SOONEST = 0.25, 0.5  # how soon after a look a wake-up may start the next: in poll intervals, in seconds
_PATIENCE = 5.0  # seconds that a wake-up leaves of the wait after a failure


class Polling:
    """Call `observe` for each version reached. `sleep` waits until the next look is due or `wake` is called.

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

    def wake(self) -> None:
        """Ends the current sleep, or the next one."""
        self._woken.set()

    def observe(self, commit: Commit) -> None:
        """Learns how often versions come, by the publisher's clock."""
        self._last_new = self._runtime.clock()
        before, self._last_time = self._last_time, commit.time
        if before is not None and commit.kind != FENCE and commit.time > before:
            self._period = 0.5 * (self._period or commit.time - before) + 0.5 * (commit.time - before)

    async def sleep(self, failures: int) -> None:
        """Waits until the next look is due. `failures` is the number of looks in a row that failed."""
        seconds = self._seconds(failures) * (0.75 + self._runtime.random.random() / 2)
        least = min(seconds, _PATIENCE if failures else min(self._bucket.poll_interval * _SOONEST[0], _SOONEST[1]))
        await asyncio.sleep(least)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds - least):
                await self._woken.wait()
        self._woken.clear()

    def _seconds(self, failures: int) -> float:
        fastest = self._bucket.poll_interval
        # A fifth of the time between versions, and less often the longer none has come.
        idle = self._runtime.clock() - self._last_new
        seconds = max(self._period / 5, idle / 50, fastest)
        return min(seconds * 2.0 ** min(failures, 10), max(_SLOWEST, fastest))
