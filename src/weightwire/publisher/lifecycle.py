"""Whether a publisher still works: it is woken when there is something to do, told to close, and may fail for good."""

from __future__ import annotations

import asyncio

from weightwire.errors import Closed, WeightwireError

__all__ = ["Lifecycle"]


class Lifecycle:
    """`failure` is why nothing more is published; `closing` that the publisher ends when nothing is left to do."""

    failure: WeightwireError | None
    closing: bool

    def __init__(self) -> None:
        self.failure = None
        self.closing = False
        self._wake = asyncio.Event()

    @property
    def is_woken(self) -> bool:
        return self._wake.is_set()

    def wake(self) -> None:
        self._wake.set()

    async def sleep(self, seconds: float | None = None) -> bool:
        """Until it is woken, or so many seconds have passed: then it is False."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    def close(self) -> None:
        self.closing = True
        self.wake()

    @property
    def ending(self) -> WeightwireError:
        """What is told to those whose weights will not be published any more."""
        return self.failure or Closed("the publisher was closed before this was published")

    def fail(self, failure: WeightwireError) -> None:
        """The first failure counts."""
        self.failure = self.failure or failure
