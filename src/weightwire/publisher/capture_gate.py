"""Who may overwrite the captured weights, and when: one capture at a time, and none that a diff must wait for.

Knows threads and turns; no weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightwire.system import Stopped

__all__ = ["CaptureGate"]

_OFTEN = 0.05  # seconds


class CaptureGate:
    """`changed` guards everything that captures and diffs share, and is notified of every change to it.

    Where several ranks publish together, captures are counted by turn: so that all can `hold` theirs, agree on one
    turn, `let` whoever has not reached it go on so far, and take that one.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_capturing = False
        self._takers = 0
        self._turn = 0  # of the capture that began last
        self._limit: int | None = None  # the turn that captures are held at

    # --- captures and diffs; all of these are called with `changed` held ---

    def enter(self, turn: int, stop: threading.Event) -> None:
        """Waits until a capture may begin, and begins it."""
        self.wait_until(lambda: self._may_begin(turn), stop)
        self.is_capturing, self._turn = True, max(self._turn, turn)

    def leave(self) -> None:
        self.is_capturing = False
        self.changed.notify_all()

    @contextmanager
    def between_captures(self) -> Iterator[None]:
        """Waits for a capture in progress to end; no other begins before this has ended."""
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
            self.changed.wait(_OFTEN)

    def _may_begin(self, turn: int) -> bool:
        # A diff that waits goes first, or captures in quick succession would keep it waiting for ever.
        return not self.is_capturing and not self._takers and (self._limit is None or turn <= self._limit)

    # --- turns ---

    def hold(self) -> int:
        """Lets no capture begin from now on; returns the turn of the last, when that has ended."""
        with self.changed:
            self._limit = self._turn
            self.changed.wait_for(lambda: not self.is_capturing)
            return self._turn

    def let(self, turn: int | None) -> None:
        """Lets captures go on, up to this turn and no further; None lets all of them."""
        with self.changed:
            self._limit = turn
            self.changed.notify_all()

    def skip(self, turn: int) -> None:
        """There will be no capture of this turn: it failed before it began."""
        with self.changed:
            self._turn = max(self._turn, turn)
            self.changed.notify_all()

    def reached(self, turn: int) -> bool:
        """That the capture of this turn has ended, one way or the other."""
        with self.changed:
            return self._turn >= turn and not self.is_capturing
