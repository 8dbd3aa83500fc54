"""When a follower fetches a damaged file again. An anchor may be large, and is rarely repaired."""

from __future__ import annotations

from weightwire.catchup import Fetcher
from weightwire.errors import NotFound
from weightwire.system import Runtime

__all__ = ["DamageBackoff"]

_FIRST, _LONGEST = 2.0, 600.0  # seconds


class DamageBackoff:
    """Doubles the wait after each fetch of a file that is still damaged. Missing files are tried at every look."""

    def __init__(self, fetcher: Fetcher, runtime: Runtime) -> None:
        self._lost = fetcher.lost
        self._runtime = runtime
        self._due: dict[str, tuple[float, float]] = {}  # by path: when to try again, and the wait before that

    def forget(self, *, only_due: bool) -> None:
        """Removes the files from `Fetcher.lost` that may be tried again now, or all. Call it before each look."""
        now = self._runtime.clock()
        damaged = [path for path, problem in self._lost.items() if not isinstance(problem, NotFound)]
        self._due = {
            path: due if path in damaged else (now + due[1], due[1])  # the looks since then did not reach it
            for path, due in self._due.items()
            if path in damaged or path not in self._lost
        }
        kept = {path: self._lost[path] for path in damaged if only_due and not self._is_due(path, now)}
        self._lost.clear()
        self._lost.update(kept)

    def settle(self) -> None:
        """Call it after a look that reached the newest version: other files than the lost ones are whole by now.

        A look that failed, such as one without a connection, proves nothing about the files that it did not reach.
        """
        self._due = {path: due for path, due in self._due.items() if path in self._lost}

    def _is_due(self, path: str, now: float) -> bool:
        due, wait = self._due.setdefault(path, (now + _FIRST, _FIRST))
        if now < due:
            return False
        wait = min(2 * wait, _LONGEST)
        self._due[path] = now + wait, wait
        return True
