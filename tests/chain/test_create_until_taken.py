"""create_until_taken knows what is stored in the end, even if requests or replies are lost."""

from __future__ import annotations

from typing import Any

import pytest

from support.failing_bucket import Act, Quick, Troubled, conflicting, denied, failed, in_memory, lost, missing, quickly
from support.records import Warnings, a_run, token
from weightwire.chain.record_paths import RUN
from weightwire.chain.records import Run
from weightwire.chain.writer import backoff, begin_run, create_until_taken
from weightwire.errors import AlreadyExists, BrokenChain, BucketError, NotFound, PermissionDenied, Unavailable


class TestCreateUntilTaken:
    async def create(self, bucket: Troubled, data: bytes = b"mine", **given: Any) -> bytes:
        return await create_until_taken(bucket, "commits/x", data, Quick(), Warnings(), **given)

    def test_create_stores_an_object(self) -> None:
        bucket = in_memory()
        assert quickly(self.create(bucket)) == b"mine"
        assert bucket.asked == [("create", "commits/x")]

    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_own_bytes_at_the_path_are_a_success(self, what: Any) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", what)
        assert quickly(self.create(bucket)) == b"mine"
        assert [verb for verb, _ in bucket.asked] == ["create", "get"]

    @pytest.mark.parametrize("what", [lost, conflicting, failed])
    def test_bytes_of_another_writer_are_returned(self, what: Any) -> None:
        async def another_was_first() -> bytes:
            bucket = in_memory()
            await bucket.inner.create("commits/x", b"another's")
            bucket.trouble("create", "", what)
            return await self.create(bucket)

        assert quickly(another_was_first()) == b"another's"

    def test_a_retry_sends_the_same_bytes(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", failed, times=3)
        assert quickly(self.create(bucket)) == b"mine"
        assert bucket.count("create") == 4

    def test_a_request_that_arrives_late_is_recognized(self) -> None:
        """The first request is still in flight when the second is sent."""

        async def late() -> tuple[bytes, int]:
            bucket = in_memory()
            in_flight: list[Act] = []

            async def delayed(act: Act) -> None:
                in_flight.append(act)
                raise Unavailable("no answer")

            async def overtaken(act: Act) -> None:
                await in_flight.pop()()
                raise Unavailable("no answer")

            bucket.trouble("create", "", delayed)
            bucket.trouble("create", "", overtaken)
            return await self.create(bucket), bucket.count("create")

        data, sent = quickly(late())
        assert data == b"mine"
        assert sent == 2

    def test_reading_back_is_retried(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", lost)
        bucket.trouble("get", "", failed, times=5)
        assert quickly(self.create(bucket)) == b"mine"

    @pytest.mark.parametrize("what", [failed, denied])
    def test_create_never_gives_up_by_default(self, what: Any) -> None:
        """A request that failed may still arrive."""
        bucket = in_memory()
        bucket.trouble("create get", "", what, times=20)
        assert quickly(self.create(bucket)) == b"mine"
        assert len(bucket.asked) > 20

    def test_create_gives_up_after_the_given_tries(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", failed, times=100)
        with pytest.raises(Unavailable):
            quickly(self.create(bucket, tries=5))
        assert bucket.count("create") == 5

    def test_create_gives_up_at_once_without_permission(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", denied, times=100)
        with pytest.raises(PermissionDenied):
            quickly(self.create(bucket, tries=5))
        assert bucket.count("create") == 1

    def test_a_store_that_contradicts_itself_is_not_asked_without_a_pause(self) -> None:
        """A folder or a FIFO in place of a commit: it exists, and it cannot be read."""
        bucket = in_memory()
        bucket.trouble("create", "", conflicting, times=1e9)
        bucket.trouble("get", "", missing, times=1e9)
        with pytest.raises(NotFound):
            quickly(self.create(bucket, tries=5))
        assert bucket.count("create") == 5

    def test_something_that_exists_and_cannot_be_read_has_taken_the_place(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", conflicting, times=1e9)
        bucket.trouble("get", "", missing, times=1e9)
        with pytest.raises(BrokenChain, match="exists, but cannot be read") as caught:
            quickly(self.create(bucket))
        assert caught.value.hint
        assert bucket.count("create") == 20

    def test_create_warns_while_it_retries(self) -> None:
        bucket, warnings = in_memory(), Warnings()
        bucket.trouble("create", "", failed, times=2)
        quickly(create_until_taken(bucket, "commits/x", b"", Quick(), warnings))
        assert warnings == ["commits/x: the request failed; trying again"] * 2


class TestBackoff:
    def test_backoff_grows_up_to_a_limit(self) -> None:
        waits = [[backoff(Quick(), tries) for _ in range(50)] for tries in range(1, 30)]
        assert 0.1 <= min(waits[0]) <= max(waits[0]) <= 0.3
        assert max(waits[1]) <= 0.6
        assert 7.5 <= min(waits[28]) <= max(waits[28]) <= 22.5

    def test_backoff_is_random(self) -> None:
        assert len({backoff(Quick(), 3) for _ in range(50)}) == 50


class TestBeginRun:
    def test_the_first_run_record_counts(self) -> None:
        async def two() -> tuple[Run, Run]:
            bucket = in_memory()
            runs = [a_run(run=token(name)) for name in ("one", "two")]
            return tuple([await begin_run(bucket, one, Quick(), Warnings()) for one in runs])  # type: ignore[return-value]

        first, second = quickly(two())
        assert first == second == a_run(run=token("one"))

    def test_a_lost_reply_is_a_success(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", RUN, lost)
        assert quickly(begin_run(bucket, a_run(), Quick(), Warnings())) == a_run()

    def test_a_key_without_write_permission_cannot_begin_a_run(self) -> None:
        bucket = in_memory()
        bucket.trouble("create", "", denied, times=100)
        with pytest.raises(PermissionDenied):
            quickly(begin_run(bucket, a_run(), Quick(), Warnings()))


def test_the_failing_bucket_fails_as_described() -> None:
    """The tests above rely on it."""

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
