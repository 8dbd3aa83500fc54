"""Meetings of ranks: all get the same results, and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from support.rank_circle import RankCircle
from weightwire.catchup import NoPath
from weightwire.errors import BucketError, DataGone, RankFailed
from weightwire.publisher.ranks.protocol import Meeting


class Word(msgspec.Struct, frozen=True):
    text: str


class TestMeeting:
    def meet(self, *works: Callable[[Meeting], Coroutine[Any, Any, Any]]) -> list[Any]:
        """The outcome on each rank."""

        async def whole() -> list[Any]:
            circle = RankCircle(len(works))
            parts = [work(Meeting(circle.seat(rank))) for rank, work in enumerate(works)]
            return await asyncio.gather(*parts, return_exceptions=True)

        return asyncio.run(whole())

    async def say(self, text: str) -> Word:
        return Word(text)

    async def fail(self, problem: Exception) -> Word:
        raise problem

    def test_every_rank_gets_the_results_of_all(self) -> None:
        heard = self.meet(*(lambda one, text=text: one.run_on_all("x", self.say(text), Word) for text in "abc"))
        assert heard == [[Word("a"), Word("b"), Word("c")]] * 3

    def test_a_failure_on_one_rank_fails_all(self) -> None:
        problem = BucketError("it is full", hint="make room")
        mine, theirs = self.meet(
            lambda one: one.run_on_all("x", self.say("a"), Word),
            lambda one: one.run_on_all("x", self.fail(problem), Word),
        )
        assert theirs is problem
        assert (type(mine), mine.message, mine.hint) == (BucketError, "rank 1: it is full", "make room")

    def test_errors_are_rebuilt_from_their_codes(self) -> None:
        mine, _ = self.meet(
            lambda one: one.run_on_all("x", self.say("a"), Word),
            lambda one: one.run_on_all("x", self.fail(NoPath("lost")), Word),
        )
        assert (type(mine), mine.message) == (DataGone, "rank 1: lost")

    def test_unfinished_work_of_other_ranks_is_cancelled(self) -> None:
        cancelled = []

        async def long() -> Word:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return Word("")

        async def patient(one: Meeting) -> Any:
            return await one.run_on_all("x", long(), Word)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightwire.publisher.ranks.protocol.PULSE", 0.01)
            mine, theirs = self.meet(patient, lambda one: one.run_on_all("x", self.fail(BucketError("no")), Word))
        assert (type(mine), type(theirs), cancelled) == (BucketError, BucketError, [True])

    def test_a_final_failure_comes_before_others(self) -> None:
        heard = self.meet(
            lambda one: one.run_on_all("x", self.fail(BucketError("no")), Word),
            lambda one: one.run_on_all("x", self.fail(ZeroDivisionError("a bug")), Word),
            lambda one: one.run_on_all("x", self.fail(BucketError("no")), Word),
        )
        assert [type(one) for one in heard] == [RankFailed, ZeroDivisionError, RankFailed]
        assert "rank 1: the publisher failed (ZeroDivisionError: a bug)" in heard[0].message

    def test_ranks_that_are_out_of_step_fail(self) -> None:
        heard = self.meet(
            lambda one: one.run_on_all("x", self.say("a"), Word), lambda one: one.run_on_all("y", self.say("b"), Word)
        )
        assert all(isinstance(one, RankFailed) and "out of step" in one.message for one in heard)

    def test_all_get_the_result_of_rank_0(self) -> None:
        assert self.meet(
            lambda one: one.run_on_rank_0("x", self.say("a"), Word), lambda one: one.run_on_rank_0("x", None, Word)
        ) == [
            Word("a"),
            Word("a"),
        ]
