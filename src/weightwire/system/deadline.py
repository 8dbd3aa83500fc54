"""How long a call that waits in several places may still wait."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """So many seconds from now on; None never ends."""

    def __init__(self, timeout: float | None) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """In seconds, and never negative: for calls that take a timeout."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())
