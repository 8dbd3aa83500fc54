"""Creating an object and making sure of it: whatever becomes of requests and replies, it is known what lies there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from support.failing_bucket import Act, Quick, Troubled, conflicting, denied, failed, in_memory, lost, quickly
from support.records import Warnings, a_run, token
from weightwire.chain.records import RUN, Run
from weightwire.chain.writer import backoff, begin_run, create_until_taken
from weightwire.errors import AlreadyExists, BucketError, PermissionDenied, Unavailable


class TestCreateUntilTaken:
    async def create(self, bucket: Troubled, data: bytes = b"mine", **given: Any) -> bytes:
        return await create_until_taken(bucket, "commits/x", data, Quick(), Warnings(), **given)

    def test_creates(self) -> None:
        bucket = in_memory()
        assert quickly(self.create(bucket)) == b"mine"
        assert bucket.asked == [("create", "commits/x")]

    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_ones_own_bytes_are_success(self, what: Any) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", what)
        assert quickly(self.create(bucket)) == b"mine"
        assert [verb for verb, _ in bucket.asked] == ["create", "get"]

    @pytest.mark.parametrize("what", [lost, conflicting, failed])
    def test_anothers_bytes_are_returned(self, what: Any) -> None:
        async def another_was_first() -> bytes:
            bucket = in_memory()
            await bucket.inner.create("commits/x", b"another's")
            bucket.trouble("create", "", what)
            return await self.create(bucket)

        assert quickly(another_was_first()) == b"another's"

    def test_the_same_bytes_are_sent_again(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", failed, times=3)
        assert quickly(self.create(bucket)) == b"mine"
        assert bucket.count("create") == 4

    def test_one_that_arrives_late_is_recognised(self) -> None:
        """The first is still under way when the second is sent."""

        async def late() -> tuple[bytes, int]:
            bucket = in_memory()
            landing: list[Awaitable[None]] = []

            async def delayed(act: Act) -> None:
                async def land() -> None:
                    await asyncio.sleep(3)
                    await act()

                landing.append(asyncio.create_task(land()))
                raise Unavailable("no answer")

            bucket.trouble("create", "", delayed)
            bucket.trouble("create", "", failed, times=1e9)
            data = await self.create(bucket)
            await asyncio.gather(*landing)
            return data, bucket.count("create")

        data, sent = quickly(late())
        assert data == b"mine"
        assert sent > 1

    def test_it_is_read_back_until_it_can_be(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", lost)
        bucket.trouble("get", "", failed, times=5)
        assert quickly(self.create(bucket)) == b"mine"

    @pytest.mark.parametrize("what", [failed, denied])
    def test_it_is_never_given_up(self, what: Any) -> None:
        """However it fails: what was sent may still arrive."""
        bucket = in_memory()
        bucket.trouble("create get", "", what, times=20)
        assert quickly(self.create(bucket)) == b"mine"
        assert len(bucket.asked) > 20

    def test_it_is_given_up_where_nothing_depends_on_it(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", failed, times=100)
        with pytest.raises(Unavailable):
            quickly(self.create(bucket, tries=5))
        assert bucket.count("create") == 5

    def test_it_is_given_up_at_once_where_it_is_forbidden(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", denied, times=100)
        with pytest.raises(PermissionDenied):
            quickly(self.create(bucket, tries=5))
        assert bucket.count("create") == 1

    def test_it_says_what_it_waits_for(self) -> None:
        bucket, warnings = in_memory(), Warnings()
        bucket.trouble("create", "", failed, times=2)
        quickly(create_until_taken(bucket, "commits/x", b"", Quick(), warnings))
        assert warnings == ["commits/x: the request failed; trying again"] * 2


class TestBackoff:
    def test_grows_and_ends_somewhere(self) -> None:
        waits = [[backoff(Quick(), tries) for _ in range(50)] for tries in range(1, 30)]
        assert 0.1 <= min(waits[0]) <= max(waits[0]) <= 0.3
        assert max(waits[1]) <= 0.6
        assert 7.5 <= min(waits[28]) <= max(waits[28]) <= 22.5

    def test_is_never_the_same_for_two(self) -> None:
        assert len({backoff(Quick(), 3) for _ in range(50)}) == 50


class TestBeginRun:
    def test_the_first_counts(self) -> None:
        async def two() -> tuple[Run, Run]:
            bucket = in_memory()
            runs = [a_run(run=token(name)) for name in ("one", "two")]
            return tuple([await begin_run(bucket, one, Quick(), Warnings()) for one in runs])  # type: ignore[return-value]

        first, second = quickly(two())
        assert first == second == a_run(run=token("one"))

    def test_ones_own_after_a_lost_reply(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", RUN, lost)
        assert quickly(begin_run(bucket, a_run(), Quick(), Warnings())) == a_run()

    def test_a_bucket_that_may_not_be_written(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", denied, times=100)
        with pytest.raises(PermissionDenied):
            quickly(begin_run(bucket, a_run(), Quick(), Warnings()))


def test_the_troubles_are_what_they_say() -> None:
    """The tests above stand on them."""

    async def outcome(what: Any) -> tuple[type[BaseException] | None, bool]:
        bucket = in_memory()
        bucket.trouble("create", "", what)
        problem: BaseException | None = None
        try:
            await bucket.create("x", b"")
        except BucketError as caught:
            problem = caught
        return type(problem) if problem else None, await bucket.find("x") is not None

    assert quickly(outcome(failed)) == (Unavailable, False)
    assert quickly(outcome(lost)) == (Unavailable, True)
    assert quickly(outcome(conflicting)) == (AlreadyExists, True)
    assert quickly(outcome(denied)) == (PermissionDenied, False)
