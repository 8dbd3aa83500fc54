"""A deadline for a call that waits in several places."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """`timeout` seconds from now. None means no deadline."""

    def __init__(self, timeout: float | None) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """The seconds left, never negative: a timeout for the next call."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())
