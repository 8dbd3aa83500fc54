"""Notices another running follower with the same name: it overwrites the heartbeats of this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from hashlib import sha256

from weightwire.follower.follow_context import FollowContext

__all__ = ["NameWatch"]

_EVERY = 15.0  # seconds between two checks, as between two heartbeats
_OWN = 64  # heartbeats that are remembered: replies may be lost, and one may land late


class NameWatch:
    """Call `remember` before each heartbeat, and `check` with what is in the bucket whenever it `is_due`."""

    def __init__(self, context: FollowContext, rename: Callable[[], str] | None) -> None:
        self._context = context
        self._rename = rename
        self._own: deque[bytes] = deque(maxlen=_OWN)
        self._checked = context.runtime.clock()
        self._warned = False

    def is_due(self) -> bool:
        """Rarely: it costs a request. Never before the first heartbeat: the last one may be of this replica."""
        return bool(self._own) and self._context.runtime.clock() - self._checked >= _EVERY

    def remember(self, data: bytes) -> None:
        self._own.append(sha256(data).digest())

    def check(self, name: str, found: bytes | None) -> str:
        """The name to use from now on. `found` is the heartbeat in the bucket, which should be one of our own."""
        self._checked = self._context.runtime.clock()
        if found is None or sha256(found).digest() in self._own:
            return name
        if self._rename is None:
            if not self._warned:
                self._context.warn(f"another running follower uses the name {name}: give each its own --name")
            self._warned = True
            return name
        new = self._rename()
        self._own.clear()
        self._context.warn(f"another running follower uses the name {name}, so this one is now {new}")
        return new
