"""The outcome of one publish: committed as a version, superseded by a newer one, or failed. Thread-safe."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat, SupportsIndex

from weightwire.chain import Commit, StageTiming
from weightwire.errors import WeightwireError
from weightwire.system import Deadline

__all__ = ["Publication", "read_metrics", "read_step"]


@dataclass(eq=False, repr=False)
class Publication:
    """Returned by `Publisher.publish`. The upload continues in the background.

    `version` and `commit` are set once it is committed. `superseded_by` is set if a newer capture replaced it before
    that, and `error` if it failed: the next version then includes its changes.
    """

    step: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    stages: Mapping[str, StageTiming] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    commit: Commit | None = None
    superseded_by: Publication | None = None
    error: WeightwireError | None = None
    raised: bool = False  # `wait` has raised the error
    turn: int = 0  # counts a rank's publishes, if several ranks publish together
    waiters: set[int] = field(default_factory=set, repr=False)  # threads that are waiting for it
    _done: threading.Event = field(default_factory=threading.Event, repr=False)

    def __repr__(self) -> str:
        return f"<Publication of {self.name}: {self._outcome}>"

    @property
    def name(self) -> str:
        return "weights without a step" if self.step is None else f"step {self.step}"

    @property
    def _outcome(self) -> str:
        if self.commit is not None:
            return f"version {self.commit.version}, {self.commit.kind} of {self.commit.nbytes:,} bytes"
        if self.superseded_by is not None:
            return f"superseded by {self.superseded_by.name}"
        return "not committed yet" if self.error is None else f"failed ({self.error.message})"

    @property
    def version(self) -> int | None:
        return self.commit.version if self.commit else None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the version that holds these weights, or newer ones that replaced them. Raises the failure."""
        deadline = Deadline(timeout)
        one = self
        while True:
            if not one._wait(deadline.left):
                raise TimeoutError(f"{self.name}: not committed after {timeout:g} s")
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


def read_step(step: SupportsIndex | None) -> int | None:
    try:
        return None if step is None else operator.index(step)
    except TypeError as problem:
        raise TypeError(f"step must be an integer, not {type(step).__name__}") from problem


def read_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Metrics as a commit stores them: NaN and infinity become None, because JSON has neither."""
    numbers = {str(name): _number(name, value) for name, value in metrics.items()}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as problem:  # torch raises a RuntimeError
        raise TypeError(f"metric {name!r} must be a number, not {type(value).__name__}") from problem
