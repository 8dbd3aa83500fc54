"""PublishLoop with a failing bucket: a committed version is stored, and a failed one is part of the next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.failing_bucket import Act, conflicting, failed, lost, slow
from support.publish_scene import HeldRequests, LoopTrainer, in_virtual_time, over, play, simulated_bucket, steps, until
from support.run_contents import commits_in, version_in
from weightwire import digest
from weightwire.chain.record_paths import HEAD
from weightwire.errors import Fenced, Interrupted, Unavailable, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.weights.source import read_weights


class TestCommits:
    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_a_commit_whose_reply_was_lost_is_made_once(self, what: Any) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            for version in range(2, 6):
                trainer.bucket.trouble("create", "commits/", what)
                assert (await over(trainer.publish())).version == version

        assert steps(play(scene)) == [None, 1, 2, 3, 4, 5]

    def test_a_commit_that_was_sent_is_never_given_up(self) -> None:
        """Even if it takes long and newer weights wait: it may have arrived."""

        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("create get", "commits/", failed, times=20)
            first = trainer.publish()
            await until(lambda: trainer.bucket.count("create", "commits/") > 3)
            others = [trainer.publish() for _ in range(3)]
            assert (await over(first)).version == 2
            assert (await over(others[-1])).version == 3
            assert others[0].superseded_by is others[1]

        assert steps(play(scene, retry_seconds=1.0)) == [None, 1, 2, 5]

    def test_a_commit_may_arrive_late(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            landing: list[asyncio.Task[None]] = []

            async def delayed(act: Act) -> None:
                async def land() -> None:
                    await asyncio.sleep(2)
                    await act()

                landing.append(asyncio.create_task(land()))
                raise Unavailable("no answer")

            trainer.bucket.trouble("create", "commits/", delayed)
            trainer.bucket.trouble("create", "commits/", failed, times=1e9)
            assert (await over(trainer.publish())).version == 2
            await asyncio.gather(*landing)
            trainer.bucket.calm()
            await trainer.publish_all(1)

        assert steps(play(scene)) == [None, 1, 2, 3]

    def test_a_commit_of_another_publisher_fences_this_one_off(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            other = await LoopTrainer(trainer.bucket).start()
            await other.publish_all(1)
            publication = await over(trainer.publish())
            assert isinstance(publication.error, Fenced)
            assert trainer.work.context.lifecycle.failure is publication.error
            assert (await over(trainer.publish())).error is publication.error
            await other.publish_all(1)
            await other.close()

        trainer = play(scene)
        assert [commit.epoch for commit in commits_in(trainer.bucket)] == [1, 1, 2, 2, 2]

    def test_a_publisher_is_fenced_off_during_its_upload(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            async def overtaken(act: Act) -> None:
                await act()
                other = await LoopTrainer(trainer.bucket).start()
                await other.publish_all(1)
                await other.close()

            trainer.bucket.trouble("put", "deltas/", overtaken)
            assert isinstance((await over(trainer.publish())).error, Fenced)

        assert [commit.kind for commit in commits_in(play(scene).bucket)] == ["fence", "anchor", "fence", "delta"]


class TestClose:
    def test_a_capture_just_before_close_is_published(self) -> None:
        async def scene() -> tuple[LoopTrainer, Publication]:
            trainer = await LoopTrainer(simulated_bucket()).start()
            await trainer.publish_all(1)
            await until(lambda: not trainer.work.context.lifecycle.is_woken)
            late = trainer.publish()
            trainer.work.context.lifecycle.close()  # as `close` does, before anything else runs
            await trainer.close()
            return trainer, late

        trainer, late = in_virtual_time(scene())
        assert late.version == 2
        assert version_in(trainer.bucket) == digest(trainer.weights)


class TestInterrupts:
    """Ctrl-C in a blocking publish, or a stopped loop."""

    def interrupted(self, verb: str, prefix: str) -> LoopTrainer:
        async def scene(trainer: LoopTrainer) -> None:
            before = trainer.bucket.count(verb, prefix)
            trainer.bucket.trouble(verb, prefix, slow(1e6))
            trainer.train()
            publication = Publication(step=2)
            task = asyncio.create_task(trainer.work.publish_now(publication, read_weights(trainer.weights)))
            await until(lambda: trainer.bucket.count(verb, prefix) > before)
            task.cancel()
            await asyncio.wait([task])
            assert publication.error is not None
            trainer.train()
            assert isinstance((await over(trainer.publish())).error, WeightwireError)

        return play(scene)

    def test_an_interrupt_while_a_commit_is_sent_ends_the_publisher(self) -> None:
        """The commit may still arrive: nothing else may be sent in its place."""
        trainer = self.interrupted("create", "commits/")
        assert isinstance(trainer.work.context.lifecycle.failure, Interrupted)
        assert "interrupted" in trainer.work.context.lifecycle.failure.message
        assert steps(trainer) == [None, 1]

    def test_an_interrupt_while_data_is_uploaded_ends_the_publisher(self) -> None:
        trainer = self.interrupted("put", "deltas/")
        assert trainer.work.context.lifecycle.failure is not None
        assert steps(trainer) == [None, 1]
        assert trainer.held == commits_in(trainer.bucket)[-1].after

    def test_a_new_publisher_continues_after_an_interrupt(self) -> None:
        bucket = self.interrupted("create", "commits/").bucket

        async def again() -> LoopTrainer:
            trainer = await LoopTrainer(bucket).start()
            await trainer.publish_all(2)
            await trainer.close()
            return trainer

        trainer = in_virtual_time(again())
        assert version_in(bucket) == digest(trainer.weights)


class TestBugs:
    def test_a_bug_stops_the_publisher(self) -> None:
        """Its copies may differ from what it published, so it must not continue."""

        async def bug(act: Act) -> None:
            raise RuntimeError("a bug")

        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", "deltas/", bug)
            publication = await over(trainer.publish())
            assert publication.error is not None
            assert publication.error.message == "the publisher failed (RuntimeError: a bug)"
            assert isinstance(publication.error.__cause__, RuntimeError)
            assert (await over(trainer.publish())).error is publication.error

        assert steps(play(scene)) == [None, 1]


class TestBackgroundWork:
    def test_a_failed_hint_is_only_a_warning(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", HEAD, failed, times=100)
            await trainer.publish_all(3)

        trainer = play(scene)
        assert "HEAD.json: the request failed" in trainer.warnings
        assert steps(trainer) == [None, 1, 2, 3, 4]

    def test_hints_do_not_pile_up(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            gate = HeldRequests()
            trainer.bucket.trouble("put", HEAD, gate)
            await trainer.publish_all(5)
            assert trainer.bucket.count("put", HEAD) <= 2
            gate.set()

        play(scene)

    def test_versions_do_not_wait_for_an_anchor(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            gate = HeldRequests()
            trainer.bucket.trouble("put", "anchors/", gate)
            await trainer.publish_all(6)
            assert not await trainer.bucket.list("shortcuts/")
            assert trainer.bucket.count("put", "anchors/2/") == 1
            assert trainer.bucket.count("put", "anchors/") == 2  # including that of version 1: one at a time
            gate.set()

        trainer = play(scene, anchor_every=1)
        assert steps(trainer) == [None, 1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.parametrize("what", [lost, conflicting, failed])
    def test_a_shortcut_is_created_once(self, what: Any) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("create", "shortcuts/", what)
            await trainer.publish_all(2)
            await trainer.work.context.background.wait()

        trainer = play(scene, anchor_every=2)
        made = asyncio.run(trainer.bucket.list("shortcuts/"))
        assert [one.path.split("/")[1] for one in made] == ["3"]

    def test_close_waits_for_an_anchor_in_progress(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", "anchors/", slow(100))
            await trainer.publish_all(1)

        trainer = play(scene, anchor_every=1)
        assert len(asyncio.run(trainer.bucket.list("shortcuts/"))) == 1


class TestReplicas:
    def test_unreadable_heartbeats_do_not_count(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            await trainer.bucket.put("replicas/rotten.json", b"?")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(trainer.work.wait_for_replicas(1, 1), 5)
            await trainer.work.wait_for_replicas(1, 0)

        play(scene)
