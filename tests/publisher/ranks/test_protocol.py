"""Meetings of ranks: all hear the same, and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from support.rank_circle import RankCircle
from weightwire.catchup import NoWay
from weightwire.errors import BucketError, DataGone, RankFailed
from weightwire.publisher.ranks.protocol import Meeting


class Word(msgspec.Struct, frozen=True):
    text: str


class TestMeeting:
    def meet(self, *works: Callable[[Meeting], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What became of each rank's part."""

        async def whole() -> list[Any]:
            circle = RankCircle(len(works))
            parts = [work(Meeting(circle.seat(rank))) for rank, work in enumerate(works)]
            return await asyncio.gather(*parts, return_exceptions=True)

        return asyncio.run(whole())

    async def say(self, text: str) -> Word:
        return Word(text)

    async def fail(self, problem: Exception) -> Word:
        raise problem

    def test_every_rank_hears_what_all_say(self) -> None:
        heard = self.meet(*(lambda one, text=text: one.meet("x", self.say(text), Word) for text in "abc"))
        assert heard == [[Word("a"), Word("b"), Word("c")]] * 3

    def test_what_fails_on_one_rank_fails_on_all(self) -> None:
        problem = BucketError("it is full", hint="make room")
        mine, theirs = self.meet(
            lambda one: one.meet("x", self.say("a"), Word), lambda one: one.meet("x", self.fail(problem), Word)
        )
        assert theirs is problem
        assert (type(mine), mine.message, mine.hint) == (BucketError, "rank 1: it is full", "make room")

    def test_an_error_that_other_ranks_do_not_know_by_name_is_known_by_its_code(self) -> None:
        mine, _ = self.meet(
            lambda one: one.meet("x", self.say("a"), Word), lambda one: one.meet("x", self.fail(NoWay("lost")), Word)
        )
        assert (type(mine), mine.message) == (DataGone, "rank 1: lost")

    def test_unfinished_work_of_others_is_cancelled(self) -> None:
        cancelled = []

        async def long() -> Word:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return Word("")

        async def patient(one: Meeting) -> Any:
            return await one.meet("x", long(), Word)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightwire.publisher.ranks.protocol.PULSE", 0.01)
            mine, theirs = self.meet(patient, lambda one: one.meet("x", self.fail(BucketError("no")), Word))
        assert (type(mine), type(theirs), cancelled) == (BucketError, BucketError, [True])

    def test_a_final_failure_comes_before_others(self) -> None:
        heard = self.meet(
            lambda one: one.meet("x", self.fail(BucketError("no")), Word),
            lambda one: one.meet("x", self.fail(ZeroDivisionError("a bug")), Word),
            lambda one: one.meet("x", self.fail(BucketError("no")), Word),
        )
        assert [type(one) for one in heard] == [RankFailed, ZeroDivisionError, RankFailed]
        assert "rank 1: the publisher failed (ZeroDivisionError: a bug)" in heard[0].message

    def test_ranks_that_are_out_of_step_fail(self) -> None:
        heard = self.meet(
            lambda one: one.meet("x", self.say("a"), Word), lambda one: one.meet("y", self.say("b"), Word)
        )
        assert all(isinstance(one, RankFailed) and "out of step" in one.message for one in heard)

    def test_all_hear_what_rank_0_did(self) -> None:
        assert self.meet(lambda one: one.hear("x", self.say("a"), Word), lambda one: one.hear("x", None, Word)) == [
            Word("a"),
            Word("a"),
        ]
