"""The publications that are not committed yet, counted for warnings about a slow bucket."""

from __future__ import annotations

import threading

from weightwire.publisher.publication import Publication

__all__ = ["Backlog"]


class Backlog:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Publication] = []
        self._superseded = 0  # since the last commit

    def add(self, publication: Publication) -> None:
        with self._lock:
            self._superseded += sum(one.superseded_by is not None for one in self._waiting)
            self._waiting = [one for one in self._waiting if not one.done] + [publication]

    def commit(self) -> None:
        """Removes the committed publication and those that it superseded."""
        with self._lock:
            self._waiting = [one for one in self._waiting if not one.done]
            self._superseded = 0

    def __str__(self) -> str:
        with self._lock:
            count = sum(not one.done for one in self._waiting)
            superseded = self._superseded + sum(one.superseded_by is not None for one in self._waiting)
        text = f"{count} version{' waits' if count == 1 else 's wait'}" if count else ""
        return f"{text}, {superseded} superseded" if text and superseded else text
