"""The forecast of the next version, and what polling by it costs and gains, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest

from faults.simulated_runtime import Faults, Process, SimLoop, SimRuntime
from support.failing_bucket import in_memory
from weightwire.chain.records import FENCE, Commit
from weightwire.follower.arrival_forecast import ArrivalForecast
from weightwire.follower.polling import Polling

AHEAD = 1e6  # seconds by which the publisher's clock is ahead
REQUEST = 0.02  # seconds


def a_commit(time: float, kind: str = "delta") -> Commit:
    return Commit(
        run="0" * 32,
        version=1,
        epoch=1,
        write_id="0" * 32,
        kind=kind,  # type: ignore[arg-type]
        parent="0" * 64,
        before="0" * 64,
        after="0" * 64,
        time=time,
    )


class TestForecast:
    def test_regular_versions_are_expected_one_period_later(self) -> None:
        forecast = ArrivalForecast()
        for index in range(6):
            forecast.observe(AHEAD + 10 * index, 10 * index + 0.5 - 0.05 * index)
        assert forecast.expected == pytest.approx(60 + 0.25)
        assert (forecast.period, forecast.deviation) == (10, 0)

    def test_one_long_interval_changes_nothing(self) -> None:
        forecast = ArrivalForecast()
        for time in (0, 10, 20, 30, 70, 80):
            forecast.observe(AHEAD + time, time)
        assert forecast.expected == pytest.approx(90)

    def test_unsteady_versions_are_not_expected(self) -> None:
        forecast = ArrivalForecast()
        for time in (0, 1, 7, 9, 22, 23, 31):
            forecast.observe(AHEAD + time, time)
        assert forecast.expected is None

    def test_few_versions_are_not_expected(self) -> None:
        forecast = ArrivalForecast()
        assert forecast.expected is None
        for time in (0, 10, 20):
            forecast.observe(AHEAD + time, time)
            assert forecast.expected is None

    def test_a_clock_that_stands_still_or_goes_back_is_no_interval(self) -> None:
        forecast = ArrivalForecast()
        for time in (9, 9, 9, 5, 4, 3, 2):
            forecast.observe(AHEAD + time, 0)
        assert (forecast.period, forecast.expected) == (0, None)


class Watched(NamedTuple):
    looks: int
    delays: list[float]


class FormerPolling(Polling):
    """Polls as before there were forecasts: about five times in a period."""

    def _until_expected(self) -> float:
        return self._seconds(0)


def watch(kind: type[Polling], arrivals: list[float], more: float = 0.0) -> Watched:
    """Polls a trainer whose versions arrive at these times, and for some seconds more."""

    async def whole() -> Watched:
        bucket = in_memory()
        bucket.poll_interval = 0.2
        runtime = SimRuntime(Process("test", random.Random(1), Faults()))
        polling, looks = kind(bucket, runtime), 0
        delays: list[float] = []
        began = asyncio.get_running_loop().time()
        while (now := asyncio.get_running_loop().time() - began) < arrivals[-1] + more:
            polling.begin_look()
            looks += 1
            while len(delays) < len(arrivals) and arrivals[len(delays)] <= now:
                delays.append(now - arrivals[len(delays)])
                polling.observe(a_commit(AHEAD + began + arrivals[len(delays) - 1]))
            await asyncio.sleep(REQUEST)
            await polling.sleep(0)
        return Watched(looks, delays)

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(whole())


def steps(period: float, next_interval: Callable[[random.Random], float], count: int = 120) -> Iterator[float]:
    source, at = random.Random(7), 0.0
    for _ in range(count):
        at += period * next_interval(source)
        yield at


TRAINERS: dict[str, Callable[[random.Random], float]] = {
    "regular": lambda source: 1.0,
    "2% jitter": lambda source: source.gauss(1, 0.02),
    "evaluates at times": lambda source: source.gauss(1, 0.02) + (2 if source.random() < 0.1 else 0),
}
UNSTEADY: dict[str, Callable[[random.Random], float]] = {
    "10% jitter": lambda source: source.gauss(1, 0.1),
    "20% jitter": lambda source: max(0.2, source.gauss(1, 0.2)),
    "random": lambda source: source.expovariate(1),
}


class TestPolling:
    @pytest.mark.parametrize("period", [2.5, 20.0, 100.0])
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_regular_versions_are_seen_within_a_tenth_of_the_period(self, trainer: str, period: float) -> None:
        arrivals = list(steps(period, TRAINERS[trainer]))
        new, old = watch(Polling, arrivals), watch(FormerPolling, arrivals)
        intervals = [later - earlier for earlier, later in pairwise(arrivals[7:])]
        in_time = [
            delay <= period / 10
            for delay, interval in zip(new.delays[8:], intervals, strict=False)
            if interval < 1.5 * period
        ]
        assert sum(in_time) >= 0.95 * len(in_time)
        assert sum(new.delays) < 0.6 * sum(old.delays)
        assert new.looks <= old.looks

    @pytest.mark.parametrize("period", [2.5, 20.0])
    @pytest.mark.parametrize("trainer", UNSTEADY)
    def test_unsteady_versions_are_seen_as_soon_as_before(self, trainer: str, period: float) -> None:
        arrivals = list(steps(period, UNSTEADY[trainer], 400))
        new, old = watch(Polling, arrivals), watch(FormerPolling, arrivals)
        assert sum(new.delays) < 1.1 * sum(old.delays)
        assert new.looks < 1.03 * old.looks

    def test_fast_versions_are_polled_no_faster_than_the_bucket_allows(self) -> None:
        arrivals = list(steps(0.5, TRAINERS["regular"]))
        new, old = watch(Polling, arrivals), watch(FormerPolling, arrivals)
        assert new.looks <= old.looks
        assert new.looks <= arrivals[-1] / (0.75 * 0.2)

    @pytest.mark.parametrize("period", [2.5, 20.0])
    def test_a_trainer_that_stops_is_polled_no_more_than_before(self, period: float) -> None:
        arrivals = list(steps(period, TRAINERS["regular"], 20))
        new, old = (watch(kind, arrivals, more=100 * period) for kind in (Polling, FormerPolling))
        assert new.looks <= old.looks

    def test_a_trainer_that_becomes_faster_is_noticed(self) -> None:
        slow = list(steps(20, TRAINERS["regular"], 20))
        fast = [slow[-1] + time for time in steps(5, TRAINERS["regular"], 40)]
        new = watch(Polling, [*slow, *fast])
        assert max(new.delays[30:]) < 1
        assert max(new.delays[20:30]) < 20 / 2 + 2

    def test_a_fence_is_not_an_interval(self) -> None:
        async def whole() -> None:
            polling = Polling(in_memory(), SimRuntime(Process("test", random.Random(1), Faults())))
            for index in range(6):
                polling.begin_look()
                polling.observe(a_commit(10.0 * index))
                polling.observe(a_commit(10.0 * index + 1, FENCE))
            assert polling._forecast.period == 10

        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(whole())

    def test_followers_do_not_look_at_the_same_moment(self) -> None:
        """All of them expect the next version at the same time."""

        async def whole() -> list[float]:
            found = []
            for seed in range(20):
                polling = Polling(in_memory(), SimRuntime(Process("test", random.Random(seed), Faults())))
                began = asyncio.get_running_loop().time()
                for index in range(6):
                    polling._forecast.observe(AHEAD + 20 * index, began + 20 * index - 110)
                await polling.sleep(0)
                await polling.sleep(0)
                found.append(asyncio.get_running_loop().time() - began)
            return sorted(found)

        with asyncio.Runner(loop_factory=SimLoop) as runner:
            moments = runner.run(whole())
        assert max(later - earlier for earlier, later in pairwise(moments)) < 1
        assert moments[-1] - moments[0] > 0.1
