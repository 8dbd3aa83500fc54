"""Work that holds up no version: uploads of anchors, hints, wake-ups of followers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["BackgroundTasks"]


class BackgroundTasks:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # a set that keeps the order

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def is_running(self, name: str) -> bool:
        return bool(self._named(name))

    async def wait(self, name: str | None = None) -> None:
        """Until all of that name have ended, or all there are, however they end."""
        while tasks := self._named(name):
            await asyncio.wait(tasks)

    def _named(self, name: str | None) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks if name is None or task.get_name() == name]
