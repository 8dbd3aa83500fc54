"""How often a follower looks for new versions: as often as they come, and rarely where none come or looking fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weightwire.bucket import Bucket
from weightwire.chain import FENCE, Commit
from weightwire.system import Runtime

__all__ = ["Polling"]

_SLOWEST = 30.0  # seconds between two looks


class Polling:
    """`observe` each version that was reached; `sleep` until the next look is due, or somebody calls `wake`."""

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._woken = asyncio.Event()
        self._last_new = runtime.clock()
        self._last_time: float | None = None  # of the newest commit
        self._period = 0.0  # seconds between versions, lately

    def wake(self) -> None:
        """Ends the sleep that is under way, or the next one."""
        self._woken.set()

    def observe(self, commit: Commit) -> None:
        """Learns how often versions come, by the publisher's own clock."""
        self._last_new = self._runtime.clock()
        before, self._last_time = self._last_time, commit.time
        if before is not None and commit.kind != FENCE and commit.time > before:
            self._period = 0.5 * (self._period or commit.time - before) + 0.5 * (commit.time - before)

    async def sleep(self, failures: int) -> None:
        """Waits until the next look is due. `failures`: how many looks in a row have failed."""
        seconds = self._seconds(failures) * (0.75 + self._runtime.random.random() / 2)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()

    def _seconds(self, failures: int) -> float:
        fastest = self._bucket.poll_interval
        # A fifth of the time between versions; less and less often where none have come for long.
        idle = self._runtime.clock() - self._last_new
        seconds = max(self._period / 5, idle / 50, fastest)
        return min(seconds * 2.0 ** min(failures, 10), max(_SLOWEST, fastest))
