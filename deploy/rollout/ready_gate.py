"""Whether clients may be served: asks the follower once a second. Knows HTTP. Knows nothing of weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import ClientError, ClientSession, ClientTimeout

__all__ = ["ReadyGate"]

_EVERY = 1.0  # seconds
_TIMEOUT = 2.0  # seconds for an answer


class ReadyGate:
    """Run `watch` as a task. The gate is open while the follower answers 200, and closed before the first answer."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        """`url` is the follower's /readyz."""
        self._url = url
        self._say = say
        self._ready_at: float | None = None  # of the last answer, if it was 200
        self._opened = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._ready_at is not None and time.monotonic() - self._ready_at < _EVERY + 2 * _TIMEOUT

    async def opened(self) -> None:
        """Waits until the gate opens for the first time."""
        await self._opened.wait()

    async def watch(self) -> None:
        async with ClientSession(timeout=ClientTimeout(total=_TIMEOUT)) as session:
            while True:
                was_open, self._ready_at = self.is_open, time.monotonic() if await self._ask(session) else None
                if self.is_open and not self._opened.is_set():
                    self._opened.set()
                elif self.is_open != was_open:
                    self._say("ready again" if self.is_open else "not ready: clients get 503 until this has passed")
                await asyncio.sleep(_EVERY)

    async def _ask(self, session: ClientSession) -> bool:
        try:
            async with session.get(self._url) as answer:
                return answer.status == 200
        except (ClientError, TimeoutError):
            return False
