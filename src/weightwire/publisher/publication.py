"""What became of one publish: committed as a version, superseded by a newer one, or failed. Any thread may ask."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat

from weightwire.chain import Commit, StageTiming
from weightwire.errors import WeightwireError
from weightwire.system import Deadline

__all__ = ["Publication", "read_metrics"]


@dataclass(eq=False)
class Publication:
    """Returned by `Publisher.publish`, while the work goes on in the background.

    `version` and `commit` once it is committed, `superseded_by` if a newer capture took its place before it was,
    `error` if it failed: its changes are then part of the next one.
    """

    step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    stages: Mapping[str, StageTiming] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    commit: Commit | None = None
    superseded_by: Publication | None = None
    error: WeightwireError | None = None
    raised: bool = False  # that `wait` has raised the error
    turn: int = 0  # which of a rank's publishes it is, where several ranks publish together
    waiters: set[int] = field(default_factory=set, repr=False)  # threads that wait for it at this moment
    _done: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def version(self) -> int | None:
        return self.commit.version if self.commit else None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """The version that holds these weights, or newer ones that took their place. Raises what went wrong."""
        deadline = Deadline(timeout)
        one = self
        while True:
            if not one._wait(deadline.left):
                raise TimeoutError(f"step {self.step}: not committed after {timeout:g} s")
            if one.superseded_by is None:
                break
            one = one.superseded_by
        if one.error is not None:
            one.raised = True
            raise one.error.with_traceback(None)
        assert one.version is not None
        return one.version

    def _wait(self, seconds: float | None) -> bool:
        thread = threading.get_ident()
        self.waiters.add(thread)
        try:
            return self._done.wait(seconds)
        finally:
            self.waiters.discard(thread)

    def succeed(self, commit: Commit) -> None:
        self.commit = commit
        self._done.set()

    def supersede(self, newer: Publication) -> None:
        self.superseded_by = newer
        self._done.set()

    def fail(self, error: WeightwireError) -> None:
        self.error = error
        self._done.set()


def read_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """As a commit carries them: numbers by name, and None for those that JSON does not have (NaN and infinity)."""
    numbers = {str(name): float(value) for name, value in metrics.items()}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
