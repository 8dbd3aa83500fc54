"""Decides when a capture may overwrite the captured weights: one at a time, and never ahead of a waiting diff."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightwire.system import Stopped

__all__ = ["CaptureGate"]

_POLL = 0.05  # seconds between two checks for an interrupt


class CaptureGate:
    """`changed` guards everything that captures and diffs share, and is notified of every change.

    If several ranks publish together, captures are numbered by turn. To agree on a turn, all ranks call `hold`, choose
    the newest turn, call `let(turn)` so that late ranks can reach it, and then take it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_capturing = False
        self._takers = 0
        self._turn = 0  # of the latest capture
        self._limit: int | None = None  # the last turn that may begin

    # --- captures and diffs: call these with `changed` held ---

    def enter(self, turn: int, stop: threading.Event) -> None:
        """Waits until a capture may begin, and begins it."""
        self.wait_until(lambda: self._may_begin(turn), stop)
        self.is_capturing, self._turn = True, max(self._turn, turn)

    def leave(self) -> None:
        self.is_capturing = False
        self.changed.notify_all()

    @contextmanager
    def between_captures(self) -> Iterator[None]:
        """Waits for a capture in progress to end, and lets no other begin inside the block."""
        self._takers += 1
        try:
            self.changed.wait_for(lambda: not self.is_capturing)
            yield
        finally:
            self._takers -= 1
            self.changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], stop: threading.Event) -> None:
        while not ready():
            if stop.is_set():
                raise Stopped
            self.changed.wait(_POLL)

    def _may_begin(self, turn: int) -> bool:
        # A waiting diff goes first, or frequent captures would starve it.
        return not self.is_capturing and not self._takers and (self._limit is None or turn <= self._limit)

    # --- turns ---

    def hold(self) -> int:
        """Lets no further capture begin. Waits for the last one to end and returns its turn."""
        with self.changed:
            self._limit = self._turn
            self.changed.wait_for(lambda: not self.is_capturing)
            return self._turn

    def let(self, turn: int | None) -> None:
        """Lets captures continue up to and including this turn; None removes the limit."""
        with self.changed:
            self._limit = turn
            self.changed.notify_all()

    def skip(self, turn: int) -> None:
        """Marks a turn whose capture failed before it began."""
        with self.changed:
            self._turn = max(self._turn, turn)
            self.changed.notify_all()

    def reached(self, turn: int) -> bool:
        """Whether the capture of this turn has ended, successfully or not."""
        with self.changed:
            return self._turn >= turn and not self.is_capturing
