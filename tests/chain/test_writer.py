"""ChainWriter: even if requests or replies are lost, every commit is its own, or the writer is fenced off."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from support.failing_bucket import Act, Quick, Troubled, conflicting, denied, failed, in_memory, lost, quickly
from support.records import RUN_ID, Warnings, a_run, chain_of, state, store, token
from weightwire.chain.reader import ChainReader
from weightwire.chain.record_paths import HEAD, RUN, commit_path, epoch_path
from weightwire.chain.records import Commit, Epoch, seal, unseal
from weightwire.chain.writer import ChainWriter
from weightwire.errors import AlreadyExists, BrokenChain, Fenced, ForeignRun, PermissionDenied, Unavailable

FENCE, FIRST = commit_path(0), commit_path(1)


def writer(bucket: Troubled, warnings: Warnings | None = None) -> ChainWriter:
    return ChainWriter(bucket, a_run(), Quick(), Warnings() if warnings is None else warnings)


async def started(bucket: Troubled) -> ChainWriter:
    """A writer that has taken over."""
    made = writer(bucket)
    await take_over(made)
    return made


async def take_over(one: ChainWriter) -> None:
    """Takes over a run, which is created if it does not exist."""
    with suppress(AlreadyExists):
        await one.bucket.inner.create(RUN, seal(a_run()).data)  # type: ignore[attr-defined]
    await one.take_over()


async def publish(one: ChainWriter) -> None:
    """A version, without weights behind it."""
    kind = "delta" if one.head and one.head.record.after else "base"
    after = one.head.record.after if one.head and one.head.record.after else state(1)
    await one.send(await one.prepare(kind=kind, after=after))


async def history(bucket: Troubled) -> list[Commit]:
    """All commits, checked as a reader does."""
    chain = ChainReader(bucket.inner, a_run())
    found: list[Any] = []
    while more := await chain.read_after(found[-1] if found else None):
        found += more
    return [commit.record for commit in found]


def kinds(commits: list[Commit]) -> list[tuple[str, int]]:
    return [(commit.kind, commit.epoch) for commit in commits]


class TestTakeOver:
    def test_takeover_of_an_empty_run_writes_the_first_fence(self) -> None:
        async def begin() -> tuple[ChainWriter, list[Commit], Epoch]:
            bucket = in_memory()
            one = await started(bucket)
            claim = unseal(await bucket.get(epoch_path(1)), Epoch, "").record
            return one, await history(bucket), claim

        one, commits, claim = quickly(begin())
        assert (one.epoch, one.next_version) == (1, 1)
        assert kinds(commits) == [("fence", 1)]
        assert (claim.epoch, claim.host) == (1, platform.node())

    def test_takeover_of_a_run_with_versions_adds_a_fence(self) -> None:
        async def go_on() -> tuple[ChainWriter, list[Commit]]:
            bucket = in_memory()
            await store(bucket.inner, chain_of(7))
            await bucket.inner.create(
                epoch_path(1), seal(Epoch(run=RUN_ID, epoch=1, write_id=token(""), time=0.0)).data
            )
            one = await started(bucket)
            return one, await history(bucket)

        one, commits = quickly(go_on())
        assert (one.epoch, one.next_version) == (2, 8)
        assert kinds(commits)[6:] == [("delta", 1), ("fence", 2)]
        assert commits[7].after == commits[6].after == state(6)

    def test_epochs_of_concurrent_writers_are_unique(self) -> None:
        async def many() -> list[ChainWriter | BaseException]:
            bucket = in_memory()
            return list(await asyncio.gather(*(started(bucket) for _ in range(8)), return_exceptions=True))

        results = quickly(many())
        writers = [one for one in results if isinstance(one, ChainWriter)]
        assert writers
        assert len({one.epoch for one in writers}) == len(writers)
        assert {type(one) for one in results} <= {ChainWriter, Fenced}

    def test_only_the_newest_of_many_writers_can_commit(self) -> None:
        """Each fence follows the previous one. Every other writer fails at its next commit."""

        async def many() -> tuple[list[ChainWriter], list[Any]]:
            bucket = in_memory()
            results = await asyncio.gather(*(started(bucket) for _ in range(6)), return_exceptions=True)
            writers = [one for one in results if isinstance(one, ChainWriter)]
            outcomes = await asyncio.gather(*(publish(one) for one in writers), return_exceptions=True)
            await history(bucket)
            return writers, outcomes

        writers, outcomes = quickly(many())
        newest = max(writers, key=lambda one: one.epoch)
        for one, outcome in zip(writers, outcomes, strict=True):
            assert outcome is None if one is newest else isinstance(outcome, Fenced)

    @pytest.mark.parametrize("what", [lost, conflicting, failed])
    def test_takeover_survives_lost_replies(self, what: Any) -> None:
        async def take_over() -> tuple[int, list[Commit]]:
            bucket = in_memory()
            bucket.trouble("create", "epochs/", what)
            bucket.trouble("create", "commits/", what)
            return (await started(bucket)).epoch, await history(bucket)

        epoch, commits = quickly(take_over())
        assert epoch == 1
        assert kinds(commits) == [("fence", 1)]

    def test_a_late_commit_of_an_older_epoch_counts(self) -> None:
        """The old publisher sent it before it was fenced off. The fence goes after it."""

        async def race() -> tuple[ChainWriter, list[Commit], BaseException | None]:
            bucket = in_memory()
            old = await started(bucket)
            await publish(old)

            async def overtaken(act: Act) -> None:
                await publish(old)
                await act()

            bucket.trouble("create", commit_path(2), overtaken)
            new = await started(bucket)
            [zombie] = await asyncio.gather(publish(old), return_exceptions=True)
            return new, await history(bucket), zombie

        new, commits, zombie = quickly(race())
        assert kinds(commits) == [("fence", 1), ("base", 1), ("delta", 1), ("fence", 2)]
        assert (new.epoch, new.next_version) == (2, 4)
        assert isinstance(zombie, Fenced)

    def test_many_late_commits_of_an_older_epoch_count(self) -> None:
        async def race() -> list[Commit]:
            bucket = in_memory()
            old = await started(bucket)

            async def overtaken(act: Act) -> None:
                await publish(old)
                await act()

            bucket.trouble("create", "epochs/", overtaken)
            for version in range(2, 8):
                bucket.trouble("create", commit_path(version), overtaken)
            await started(bucket)
            return await history(bucket)

        assert kinds(quickly(race()))[-2:] == [("delta", 1), ("fence", 2)]

    def test_a_fence_of_a_newer_epoch_wins(self) -> None:
        async def race() -> tuple[list[Commit], str]:
            bucket = in_memory()
            await publish(await started(bucket))

            async def overtaken(act: Act) -> None:
                bucket.calm()
                await started(bucket)
                await act()

            bucket.trouble("create", commit_path(2), overtaken)
            with pytest.raises(Fenced) as caught:
                await started(bucket)
            return await history(bucket), caught.value.message

        commits, message = quickly(race())
        assert kinds(commits) == [("fence", 1), ("base", 1), ("fence", 3)]
        assert "another publisher (epoch 3) started at the same time" in message

    def test_takeover_fails_if_a_newer_epoch_exists(self) -> None:
        async def late() -> None:
            bucket = in_memory()

            looks = 0

            async def overtaken(act: Act) -> Any:
                nonlocal looks
                looks += 1
                if looks == 2:  # the first is before the claim
                    bucket.calm()
                    await started(bucket)
                return await act()

            bucket.trouble("get", HEAD, overtaken, times=2)
            await started(bucket)

        with pytest.raises(Fenced, match="epoch 2"):
            quickly(late())

    def test_unused_epochs_are_skipped(self) -> None:
        async def skip() -> tuple[int, list[Commit]]:
            bucket = in_memory()
            bucket.trouble("create", "commits/", denied, times=1e9)
            for epoch in (1, 2, 3):
                dying = asyncio.create_task(started(bucket))
                while await bucket.find(epoch_path(epoch)) is None:
                    await asyncio.sleep(0.1)
                dying.cancel()
                await asyncio.wait([dying])
            bucket.calm()
            return (await started(bucket)).epoch, await history(bucket)

        epoch, commits = quickly(skip())
        assert epoch == 4
        assert kinds(commits) == [("fence", 4)]

    def test_a_key_without_write_permission_cannot_take_over(self) -> None:
        bucket = in_memory()
        bucket.trouble("create put", "", denied, times=1e9)
        with pytest.raises(PermissionDenied):
            quickly(started(bucket))

    def test_takeover_of_a_broken_chain_is_refused(self) -> None:
        async def go_on() -> None:
            bucket = in_memory()
            await store(bucket.inner, chain_of(6), [(commit_path(4), chain_of(3)[2].data)])
            await started(bucket)

        with pytest.raises(BrokenChain):
            quickly(go_on())

    def test_takeover_of_another_run_is_refused(self) -> None:
        async def go_on() -> None:
            bucket = in_memory()
            foreign = Commit(run=token("x"), version=0, epoch=1, write_id=token("y"), kind="fence", parent="")
            await store(bucket.inner, [seal(foreign)])
            await started(bucket)

        with pytest.raises(ForeignRun):
            quickly(go_on())


class TestCommits:
    def run(self, scene: Callable[[Troubled, ChainWriter], Awaitable[None]]) -> list[Commit]:
        """Runs a scene with a writer that has taken over. Returns the commits afterwards."""

        async def play() -> list[Commit]:
            bucket = in_memory()
            await scene(bucket, await started(bucket))
            return await history(bucket)

        return quickly(play())

    def test_commits_follow_each_other(self) -> None:
        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            for version in range(1, 20):
                assert one.next_version == version
                await publish(one)

        commits = self.run(scene)
        assert len(commits) == 20
        assert len({commit.write_id for commit in commits}) == 20

    def test_prepared_commit_starts_from_the_last_state(self) -> None:
        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            await publish(one)
            prepared = (await one.prepare(kind="delta", step=7, metrics={"loss": 0.5})).record
            assert (prepared.version, prepared.epoch, prepared.run) == (2, 1, RUN_ID)
            assert prepared.before == prepared.after == state(1)
            assert (prepared.step, prepared.metrics) == (7, {"loss": 0.5})

        assert len(self.run(scene)) == 2  # prepared commits were not sent

    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_a_commit_whose_reply_is_lost_is_a_success(self, what: Any) -> None:
        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            bucket.trouble("create", "commits/", what)
            await publish(one)
            assert one.next_version == 2

        assert kinds(self.run(scene)) == [("fence", 1), ("base", 1)]

    def test_the_same_bytes_are_sent_until_they_arrive(self) -> None:
        sent: list[Any] = []

        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            create = bucket.inner.create

            async def watched(path: str, data: bytes) -> None:
                sent.append((path, data))
                if len(sent) < 20:
                    raise Unavailable("not now")
                await create(path, data)

            bucket.create = watched  # type: ignore[method-assign]
            await publish(one)

        assert len(self.run(scene)) == 2
        assert len(sent) == 20
        assert len(set(sent)) == 1

    def test_a_commit_of_another_publisher_at_the_path_fences_the_writer(self) -> None:
        messages = []

        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            await publish(one)
            await started(bucket)
            with pytest.raises(Fenced) as caught:
                await publish(one)
            messages.append(str(caught.value))

        assert kinds(self.run(scene)) == [("fence", 1), ("base", 1), ("fence", 2)]
        assert f"another publisher (epoch 2, on {platform.node()}) has taken over this run from epoch 1" in messages[0]
        assert "hint: only one publisher may write to a run" in messages[0]

    @pytest.mark.parametrize("what", [failed, lost])
    def test_a_writer_is_fenced_even_while_replies_are_lost(self, what: Any) -> None:
        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            await started(bucket)
            bucket.trouble("create", "", what, times=3)
            bucket.trouble("get", "", failed, times=2)
            with pytest.raises(Fenced):
                await publish(one)

        assert kinds(self.run(scene)) == [("fence", 1), ("fence", 2)]

    def test_a_fenced_writer_stays_fenced(self) -> None:
        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            other = await started(bucket)
            for _ in range(3):
                with pytest.raises(Fenced):
                    await publish(one)
                await publish(other)

        assert kinds(self.run(scene)) == [("fence", 1), ("fence", 2), ("base", 2), ("delta", 2), ("delta", 2)]

    def test_a_commit_of_an_unknown_writer_at_the_path_fences_the_writer(self) -> None:
        """The writer is fenced even if the other writer cannot be identified."""

        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            await bucket.inner.create(FIRST, b"something else")
            with pytest.raises(Fenced, match="another writer has taken over"):
                await publish(one)
            await bucket.inner.delete(FIRST)
            await started(bucket)
            bucket.trouble("get", "epochs/", failed)
            with pytest.raises(Fenced, match=r"another publisher \(epoch 2\) has taken over"):
                await publish(one)

        self.run(scene)

    def test_one_of_two_racing_writers_wins(self) -> None:
        """Exactly one commits, and exactly one is fenced off."""

        async def scene(bucket: Troubled, one: ChainWriter) -> None:
            twin = writer(bucket)
            twin.epoch, twin.head = one.epoch, one.head
            for _ in range(10):
                outcomes = await asyncio.gather(publish(one), publish(twin), return_exceptions=True)
                assert {type(outcome) for outcome in outcomes} == {type(None), Fenced}
                one.head = twin.head = one.head if outcomes[0] is None else twin.head

        assert len(self.run(scene)) == 11


class TestHint:
    async def hint_of(self, bucket: Troubled, one: ChainWriter) -> dict[str, Any]:
        hint = await ChainReader(bucket, a_run()).read_hint()
        assert hint is not None
        return {"version": hint.version, "anchor": hint.anchor}

    def test_hint_names_the_newest_version(self) -> None:
        async def scene() -> dict[str, Any]:
            bucket = in_memory()
            one = await started(bucket)
            await publish(one)
            await one.hint("shortcuts/1/anchor-0123456789abcdef.json")
            return await self.hint_of(bucket, one)

        assert quickly(scene()) == {"version": 1, "anchor": "shortcuts/1/anchor-0123456789abcdef.json"}

    def test_a_failure_to_write_the_hint_is_only_a_warning(self) -> None:
        async def scene() -> Warnings:
            bucket, warnings = in_memory(), Warnings()
            one = writer(bucket, warnings)
            await take_over(one)
            bucket.trouble("put", HEAD, denied)
            await one.hint("")
            return warnings

        assert quickly(scene()) == ["HEAD.json: this key may not do that"]

    def test_hint_is_not_written_before_the_first_commit(self) -> None:
        bucket = in_memory()
        quickly(writer(bucket).hint(""))
        assert not bucket.asked
