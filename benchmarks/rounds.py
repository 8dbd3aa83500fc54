"""Times of the same round, and what is made of many rounds: medians, ratios, rows of the table.

A shared machine is fast in one second and slow in the next, so only times of the same round are compared.
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
"""Seconds of one round, by what was done; and under OTHERS, how many cores other processes kept busy."""

OTHERS = "others"


class Spread(NamedTuple):
    """The median over all rounds, and the outermost."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: list[Times], figure: Callable[[Times], float]) -> Spread:
        figures = [figure(times) for times in rounds]
        return cls(statistics.median(figures), min(figures), max(figures))


class Round:
    """Times things by name; of what is done several times in a round, the median counts."""

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
