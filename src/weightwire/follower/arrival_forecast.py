"""Predicts when the next version of a regular trainer arrives, in the follower's own time."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["ArrivalForecast"]

_INTERVALS, _DELAYS = 7, 8  # the last ones count
_LEAST = 3  # intervals
_REGULAR = 0.15  # the usual deviation of an interval, as a part of it


class ArrivalForecast:
    """Call `observe` for each version. Medians ignore an interval that is longer now and then, such as an evaluation.

    The publisher's clock gives the intervals. The smallest delay between a commit and its discovery maps its clock to
    the follower's, so the clocks may differ by any amount.
    """

    def __init__(self) -> None:
        self._last_time: float | None = None  # of the newest commit, by the publisher's clock
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._delays: deque[float] = deque(maxlen=_DELAYS)

    def observe(self, commit_time: float, found_at: float) -> None:
        """`found_at` is when the follower asked for the commit and found it."""
        if self._last_time is not None and commit_time > self._last_time:
            self._intervals.append(commit_time - self._last_time)
        self._last_time = commit_time
        self._delays.append(found_at - commit_time)

    @property
    def period(self) -> float:
        """The usual time between two versions; 0 while it is unknown."""
        return median(self._intervals) if self._intervals else 0.0

    @property
    def deviation(self) -> float:
        """How far an interval is usually from the period."""
        period = self.period
        return median(abs(one - period) for one in self._intervals) if self._intervals else 0.0

    @property
    def expected(self) -> float | None:
        """When the next version is expected; None if the trainer is not regular, or not known well enough."""
        if self._last_time is None or len(self._intervals) < _LEAST or self.deviation > _REGULAR * self.period:
            return None
        return self._last_time + self.period + min(self._delays)
