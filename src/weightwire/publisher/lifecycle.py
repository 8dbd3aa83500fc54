"""The life of a publisher: it is woken when there is work, asked to close, and may fail permanently."""

from __future__ import annotations

import asyncio

from weightwire.errors import Closed, WeightwireError

__all__ = ["Lifecycle"]


class Lifecycle:
    """`failure` is the error that ended publishing, if any. `closing` means that it ends when no work is left."""

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
        """Waits until it is woken. Returns False after `seconds`."""
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
        """The error for publications that are still pending at the end."""
        return self.failure or Closed(
            "the publisher was closed before this was published", hint="create a new publisher and publish it again"
        )

    def fail(self, failure: WeightwireError) -> None:
        """Keeps the first failure."""
        self.failure = self.failure or failure
