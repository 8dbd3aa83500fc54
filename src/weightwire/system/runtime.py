"""Time, randomness and threads, for the coroutines of catchup, publisher, follower, upkeep, inspection and page.

They use nothing else for these, so a simulation can replace the runtime and replay a run from its seed.
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
    """The real runtime. Every runtime also uses `asyncio.sleep` and the tasks of the running loop."""

    def __init__(self) -> None:
        self.random: random.Random = random.SystemRandom()

    def time(self) -> float:
        """Seconds since 1970, for display only: clocks of machines differ, so no decision may depend on it."""
        return time.time()

    def clock(self) -> float:
        """A monotonic clock in seconds, to measure durations."""
        return time.perf_counter()

    async def run_in_thread(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Runs a function that computes or does file I/O in a thread.

        A thread cannot be cancelled. Cancelling this waits for the thread to end.
        """
        thread = asyncio.ensure_future(asyncio.to_thread(partial(function, *args, **kwargs)))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise

    def token(self) -> str:
        """A unique name: 128 random bits."""
        return f"{self.random.getrandbits(128):032x}"
