"""Time, chance and threads, for every coroutine of catchup, publisher, follower, upkeep, inspection and page.

They take these from here and from nowhere else, so that a simulation can put a runtime of its own in place of this one
and replay a run from its seed. Knows nothing of weights or buckets.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

__all__ = ["Runtime"]

Result = TypeVar("Result")


class Runtime:
    """The real one. `asyncio.sleep` and the tasks of the running loop are part of any runtime."""

    def __init__(self) -> None:
        self.random: random.Random = random.SystemRandom()

    def time(self) -> float:
        """Seconds since 1970, for people: machines disagree about it, so nothing is decided by it."""
        return time.time()

    def clock(self) -> float:
        """Seconds since some moment, to measure how long something takes."""
        return time.perf_counter()

    async def run_in_thread(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Runs what computes, or reads and writes files, in a thread.

        A thread cannot be cancelled: whoever cancels this waits for it, or it would go on behind their back.
        """
        thread = asyncio.ensure_future(asyncio.to_thread(partial(function, *args, **kwargs)))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise

    def token(self) -> str:
        """A name that nobody else has: 128 random bits."""
        return f"{self.random.getrandbits(128):032x}"
