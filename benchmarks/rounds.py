"""Times measured in rounds, and their medians, ratios and table rows.

The speed of a shared machine varies from second to second, so only times of the same round are compared.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple, TypeVar

from table import Bar, Row

Result = TypeVar("Result")
Times = dict[str, float]
"""Seconds of one round by task, and under OTHERS the number of cores busy with other processes."""

OTHERS = "others"


class Spread(NamedTuple):
    """The median, lowest and highest figure over all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: list[Times], figure: Callable[[Times], float]) -> Spread:
        figures = [figure(times) for times in rounds]
        return cls(statistics.median(figures), min(figures), max(figures))


class Round:
    """Times tasks by name. If a task runs several times in a round, the median counts."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, what: str, work: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        result = work()
        self._seconds[what].append(time.perf_counter() - started)
        return result

    @property
    def times(self) -> Times:
        return {what: statistics.median(seconds) for what, seconds in self._seconds.items()}


def ratio_row(rounds: list[Times], measure: str, what: str, unit: str, bar: Bar | None) -> Row:
    spread = Spread.of(rounds, lambda times: times[what] / times[unit])
    seconds = [Spread.of(rounds, itemgetter(key)).median for key in (what, unit)]
    note = f"{range_of(spread, rounds)}; {1000 * seconds[0]:.1f} / {1000 * seconds[1]:.1f} ms"
    return Row(measure, spread.median, "{:.2f}", bar, note)


def range_of(spread: Spread, rounds: list[Times], form: str = "{:.2f}") -> str:
    return f"{form.format(spread.low)} to {form.format(spread.high)} in {len(rounds)} rounds"
