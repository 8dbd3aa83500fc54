"""A thread with an event loop: the synchronous face of coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from weightwire.errors import Closed, WeightwireError

__all__ = ["LoopThread"]

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines beside the program. Started at once; `stop` ends it and whatever still runs in it."""

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._stopped = False
        self._posting = threading.Lock()  # nothing is posted after `stop`: it would never be answered
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
        """Runs a coroutine to its end, and returns what it returns. An interrupt, or the timeout, cancels it."""
        future = self.start(coroutine)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        with self._posting:
            if not self.is_running:
                coroutine.close()
                raise self._gone()
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def tell(self, function: Callable[[], object]) -> None:
        """Calls a function in the loop's thread, and does not wait for it."""
        with self._posting:
            if not self.is_running:
                raise self._gone()
            self.loop.call_soon_threadsafe(function)

    @property
    def is_running(self) -> bool:
        """That there is someone to do the work: a forked child has only a copy of it."""
        return not self._stopped and os.getpid() == self._process

    def _gone(self) -> WeightwireError:
        if os.getpid() != self._process:
            return WeightwireError("this was made in another process", hint="make one of its own after the fork")
        return Closed("this is closed", hint="make a new one")

    def stop(self, timeout: float | None = None) -> None:
        """Ends it; what cannot be stopped within the timeout is left behind."""
        with self._posting:
            if not self.is_running:
                return
            self._stopped = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self.loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
