"""Whether the bucket shows what its publisher has done lately, by the publisher's signed sign of life."""

from __future__ import annotations

import time

from weightwire.chain import ALIVE, ChainReader, SignOfLife, rolled_back
from weightwire.errors import Stale
from weightwire.follower.follow_context import FollowContext

__all__ = ["Freshness"]


class Freshness:
    """Call `check` before each look and `check_reached` after it. Does nothing without a `max_age`."""

    def __init__(self, context: FollowContext) -> None:
        self._runtime = context.runtime
        self._max_age = context.trust.max_age
        self._alive: SignOfLife | None = None
        self._read_at = 0.0

    async def check(self, chain: ChainReader) -> None:
        """Raises Stale if the publisher has been silent for too long. Reads its sign of life now and then."""
        if self._max_age is None:
            return
        now = self._runtime.clock()
        if self._alive is None or now - self._read_at >= self._max_age / 4 or self._is_stale(self._alive):
            alive = await chain.read_alive()
            if alive is None:
                raise Stale(f"{chain.where(ALIVE)}: the publisher has shown no sign of life yet", hint=_HINT)
            self._alive, self._read_at = alive, now
        if self._is_stale(self._alive):
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._alive.time))
            raise Stale(
                f"{chain.where(ALIVE)}: last sign of life of the publisher: {when}; {self._max_age:g} s are allowed",
                hint=_HINT,
            )

    def _is_stale(self, alive: SignOfLife) -> bool:
        return self._max_age is not None and abs(self._runtime.time() - alive.time) > self._max_age

    def check_reached(self, head: int, url: str) -> None:
        """Raises if the publisher has committed a version that the bucket does not show."""
        if self._alive is not None and self._alive.version > head:
            raise rolled_back(f"{url}: its publisher is at version {self._alive.version}, but it shows only {head}")


_HINT = "check that the publisher runs, that the bucket is not an old copy, and the clocks of both machines"
