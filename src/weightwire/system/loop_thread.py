"""A thread with an event loop, for synchronous callers of coroutines."""

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
    """Runs coroutines in a background thread. `stop` ends the thread and cancels what still runs in it.

    `owner` is a noun for errors and the name of the thread: "publisher".
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._process = os.getpid()
        self._stopped = False
        self._posting = threading.Lock()  # nothing may be posted after `stop`: it would never finish
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"weightwire-{owner}", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
        """Runs a coroutine and returns its result. An interrupt or the timeout cancels it."""
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

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function in the loop's thread without waiting for it."""
        with self._posting:
            if not self.is_running:
                raise self._gone()
            self.loop.call_soon_threadsafe(function)

    @property
    def is_running(self) -> bool:
        """False after `stop`, and in a forked child, which does not have the thread."""
        return not self._stopped and os.getpid() == self._process

    def _gone(self) -> WeightwireError:
        if os.getpid() != self._process:
            return Closed(
                f"this {self._owner} was created in another process", hint=f"create a new {self._owner} after the fork"
            )
        return Closed(f"this {self._owner} is closed", hint=f"create a new {self._owner}")

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread. If that takes longer than the timeout, the thread is left running."""
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
