"""Background tasks: work that must not delay versions (anchors, hints, wake-ups) or must not be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["BackgroundTasks"]

Result = TypeVar("Result")


class BackgroundTasks:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}  # an ordered set

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def finish(self, work: Coroutine[Any, Any, Result], name: str) -> Result:
        """Runs work to its end, even if the caller is cancelled."""
        task = self.start(work, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def is_running(self, name: str) -> bool:
        return bool(self._named(name))

    async def wait(self, name: str | None = None) -> None:
        """Waits until all tasks of that name have ended, or all tasks, whatever their outcome."""
        while tasks := self._named(name):
            await asyncio.wait(tasks)

    def _named(self, name: str | None) -> list[asyncio.Task[Any]]:
        running = [task for task in self._tasks if not task.done()]  # one that has ended may not be removed yet
        return [task for task in running if name is None or task.get_name() == name]
