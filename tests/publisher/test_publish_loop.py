"""PublishLoop through a bucket that fails: what is acknowledged is there, what is not is part of the next version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from support.published import commits_in, run_in, version_in
from support.troubled import Act, Quick, Troubled, conflicting, denied, failed, in_memory, lost, quickly, slow
from weightwire import digest
from weightwire.chain.records import HEAD, RUN
from weightwire.errors import BucketError, Fenced, NotFound, PermissionDenied, Unavailable, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.system.runtime import Runtime
from weightwire.telemetry.events import Event
from weightwire.weights.source import read_weights

Arrays = dict[str, Any]


def initial() -> Arrays:
    return {"w": np.arange(4000, dtype=np.float32), "b": np.zeros(3, np.float16)}


class Trainer:
    """A publisher at work, and the weights that it publishes."""

    def __init__(self, bucket: Troubled, runtime: Runtime | None = None, **settings: Any) -> None:
        self.bucket = bucket
        self.weights = initial()
        self.heard: list[Event] = []
        given = PublisherSettings(threads=1, **settings)
        self.work = PublishLoop(PublishContext(bucket, runtime or Quick(), given, self.heard.append))
        self.running: asyncio.Task[None] | None = None
        self._step = 0

    async def start(self) -> Trainer:
        await self.work.start()
        self.running = asyncio.create_task(self.work.run())
        return self

    def train(self) -> None:
        self._step += 1
        self.weights["w"][self._step :: 97] += 1

    def publish(self) -> Publication:
        """A step, and its weights."""
        self.train()
        publication = Publication(step=self._step)
        self.work.capture(publication, read_weights(self.weights))
        self.work.wake()
        return publication

    async def publish_all(self, count: int) -> None:
        for _ in range(count):
            await over(self.publish())

    async def close(self) -> None:
        assert self.running is not None
        await self.work.close()
        await self.running
        await self.work.close()

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.heard if event.stage == "warning"]

    @property
    def held(self) -> str:
        """The state that the publisher believes to have published, by a scan of what it holds."""
        assert self.work.copies is not None
        assert self.work.state is not None
        assert digest(self.work.copies.published) == self.work.state
        return self.work.state.hex


async def over(publication: Publication) -> Publication:
    """Until it has become something, one way or the other."""
    while not publication.done:
        await asyncio.sleep(0.5)
    return publication


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.5)


class Gate(asyncio.Event):
    """Requests wait here until it is set."""

    async def __call__(self, act: Act) -> Any:
        await self.wait()
        return await act()


def play(scene: Callable[[Trainer], Awaitable[None]], **settings: Any) -> Trainer:
    """A scene with a publisher that has published version 1. Afterwards what is in the bucket is what it holds."""

    async def whole() -> Trainer:
        trainer = await Trainer(in_memory(), **settings).start()
        await trainer.publish_all(1)
        await scene(trainer)
        trainer.bucket.calm()
        await trainer.close()
        return trainer

    trainer = quickly(whole())
    if trainer.work.failure is None:
        assert version_in(trainer.bucket).hex == trainer.held
    return trainer


def steps(trainer: Trainer) -> list[int | None]:
    return [commit.step for commit in commits_in(trainer.bucket)]


class TestUploads:
    @pytest.mark.parametrize("what", [failed, lost])
    def test_are_tried_again(self, what: Any) -> None:
        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", "deltas/", what, times=5)
            publication = await over(trainer.publish())
            assert publication.version == 2

        trainer = play(scene)
        assert steps(trainer) == [None, 1, 2]
        assert trainer.bucket.count("put", "deltas/") == 6
        assert len([message for message in trainer.warnings if message.endswith("; trying again")]) == 5

    def test_are_given_up_when_patience_ends(self) -> None:
        async def scene(trainer: Trainer) -> None:
            before = trainer.held
            trainer.bucket.trouble("put", "deltas/", failed, times=1e9)
            publication = await over(trainer.publish())
            assert isinstance(publication.error, Unavailable)
            assert trainer.held == before
            trainer.bucket.calm()
            assert (await over(trainer.publish())).version == 2

        trainer = play(scene, patience=20.0)
        assert steps(trainer) == [None, 1, 3]
        assert trainer.held == digest(trainer.weights).hex
        assert "step 2: not published (the request failed); the next one includes it" in trainer.warnings

    def test_are_given_up_for_something_newer(self) -> None:
        """Patience would last for ever."""

        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", "deltas/", failed, times=1e9)
            old = trainer.publish()
            await until(lambda: trainer.bucket.count("put", "deltas/") > 0)
            new = trainer.publish()
            assert isinstance((await over(old)).error, Unavailable)
            trainer.bucket.calm()
            assert (await over(new)).version == 2

        trainer = play(scene, patience=1e9)
        assert steps(trainer) == [None, 1, 3]
        assert trainer.held == digest(trainer.weights).hex

    @pytest.mark.parametrize("problem", [PermissionDenied("no"), NotFound("no bucket")])
    def test_are_given_up_at_once_where_waiting_does_not_help(self, problem: BucketError) -> None:
        async def refuse(act: Act) -> None:
            raise problem

        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", "deltas/", refuse)
            assert (await over(trainer.publish())).error is problem
            assert trainer.bucket.count("put", "deltas/") == 1
            await over(trainer.publish())

        assert steps(play(scene)) == [None, 1, 3]

    def test_many_in_a_row_are_lost_and_nothing_is(self) -> None:
        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", "deltas/", denied, times=5)
            for _ in range(5):
                assert (await over(trainer.publish())).error is not None
            assert (await over(trainer.publish())).version == 2

        trainer = play(scene)
        assert steps(trainer) == [None, 1, 7]
        assert trainer.held == digest(trainer.weights).hex

    def test_what_could_not_be_read_is_tried_again_too(self) -> None:
        """A commit names earlier ones, which a publisher that has just started must read."""

        async def scene(trainer: Trainer) -> None:
            await trainer.publish_all(10)
            await trainer.close()
            again = await Trainer(trainer.bucket).start()
            assert (await over(again.publish())).version == 13
            assert again.work.writer is not None
            again.work.writer.chain._known.clear()
            trainer.bucket.trouble("get", "commits/", failed, times=3)
            assert (await over(again.publish())).version == 14
            await again.close()
            trainer.work = again.work

        play(scene)


class TestCommits:
    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_whose_reply_was_lost_are_made_once(self, what: Any) -> None:
        async def scene(trainer: Trainer) -> None:
            for version in range(2, 6):
                trainer.bucket.trouble("create", "commits/", what)
                assert (await over(trainer.publish())).version == version

        assert steps(play(scene)) == [None, 1, 2, 3, 4, 5]

    def test_are_never_given_up(self) -> None:
        """However long it takes, and whatever newer is waiting: this one may have arrived."""

        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("create get", "commits/", failed, times=20)
            first = trainer.publish()
            await until(lambda: trainer.bucket.count("create", "commits/") > 3)
            others = [trainer.publish() for _ in range(3)]
            assert (await over(first)).version == 2
            assert (await over(others[-1])).version == 3
            assert others[0].superseded_by is others[1]

        assert steps(play(scene, patience=1.0)) == [None, 1, 2, 5]

    def test_that_arrive_late_and_after_all(self) -> None:
        async def scene(trainer: Trainer) -> None:
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

    def test_of_another_fence_this_one_off(self) -> None:
        async def scene(trainer: Trainer) -> None:
            other = await Trainer(trainer.bucket).start()
            await other.publish_all(1)
            publication = await over(trainer.publish())
            assert isinstance(publication.error, Fenced)
            assert trainer.work.failure is publication.error
            assert (await over(trainer.publish())).error is publication.error
            await other.publish_all(1)
            await other.close()

        trainer = play(scene)
        assert [commit.epoch for commit in commits_in(trainer.bucket)] == [1, 1, 2, 2, 2]

    def test_of_another_that_came_during_the_upload(self) -> None:
        async def scene(trainer: Trainer) -> None:
            async def overtaken(act: Act) -> None:
                await act()
                other = await Trainer(trainer.bucket).start()
                await other.publish_all(1)
                await other.close()

            trainer.bucket.trouble("put", "deltas/", overtaken)
            assert isinstance((await over(trainer.publish())).error, Fenced)

        assert [commit.kind for commit in commits_in(play(scene).bucket)] == ["fence", "anchor", "fence", "delta"]


class TestTheEnd:
    def test_a_capture_just_before_it_is_published(self) -> None:
        async def scene() -> tuple[Trainer, Publication]:
            trainer = await Trainer(in_memory()).start()
            await trainer.publish_all(1)
            await until(lambda: not trainer.work.context.lifecycle.is_woken)
            late = trainer.publish()
            trainer.work.context.lifecycle.close()  # as `close` does, before anything else can happen
            await trainer.close()
            return trainer, late

        trainer, late = quickly(scene())
        assert late.version == 2
        assert version_in(trainer.bucket) == digest(trainer.weights)


class TestInterrupts:
    """Ctrl-C in a blocking publish, or a loop that is stopped."""

    def interrupted(self, verb: str, prefix: str) -> Trainer:
        async def scene(trainer: Trainer) -> None:
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

    def test_while_a_commit_is_sent(self) -> None:
        """It may still arrive: nothing else may ever be sent in its place."""
        trainer = self.interrupted("create", "commits/")
        assert trainer.work.failure is not None
        assert "interrupted" in trainer.work.failure.message
        assert steps(trainer) == [None, 1]

    def test_while_data_is_uploaded(self) -> None:
        trainer = self.interrupted("put", "deltas/")
        assert trainer.work.failure is not None
        assert steps(trainer) == [None, 1]
        assert trainer.held == commits_in(trainer.bucket)[-1].after

    def test_a_new_publisher_goes_on(self) -> None:
        bucket = self.interrupted("create", "commits/").bucket

        async def again() -> Trainer:
            trainer = await Trainer(bucket).start()
            await trainer.publish_all(2)
            await trainer.close()
            return trainer

        trainer = quickly(again())
        assert version_in(bucket) == digest(trainer.weights)


class TestBugs:
    def test_stop_the_publisher(self) -> None:
        """What it holds may not be what it published, so it must not go on as if nothing had been."""

        async def bug(act: Act) -> None:
            raise RuntimeError("a bug")

        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", "deltas/", bug)
            publication = await over(trainer.publish())
            assert publication.error is not None
            assert publication.error.message == "the publisher failed (RuntimeError: a bug)"
            assert isinstance(publication.error.__cause__, RuntimeError)
            assert (await over(trainer.publish())).error is publication.error

        assert steps(play(scene)) == [None, 1]


class TestBehind:
    def test_a_hint_that_fails_is_only_told(self) -> None:
        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", HEAD, failed, times=100)
            await trainer.publish_all(3)

        trainer = play(scene)
        assert "HEAD.json: the request failed" in trainer.warnings
        assert steps(trainer) == [None, 1, 2, 3, 4]

    def test_hints_do_not_pile_up(self) -> None:
        async def scene(trainer: Trainer) -> None:
            gate = Gate()
            trainer.bucket.trouble("put", HEAD, gate)
            await trainer.publish_all(5)
            assert trainer.bucket.count("put", HEAD) <= 2
            gate.set()

        play(scene)

    def test_versions_do_not_wait_for_an_anchor(self) -> None:
        async def scene(trainer: Trainer) -> None:
            gate = Gate()
            trainer.bucket.trouble("put", "anchors/", gate)
            await trainer.publish_all(6)
            assert not await trainer.bucket.list("shortcuts/")
            assert trainer.bucket.count("put", "anchors/2/") == 1
            assert trainer.bucket.count("put", "anchors/") == 2  # with that of version 1: one at a time
            gate.set()

        trainer = play(scene, anchor_every=1)
        assert steps(trainer) == [None, 1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.parametrize("what", [lost, conflicting, failed])
    def test_a_shortcut_is_made_once(self, what: Any) -> None:
        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("create", "shortcuts/", what)
            await trainer.publish_all(2)
            await trainer.work.context.background.wait()

        trainer = play(scene, anchor_every=2)
        made = asyncio.run(trainer.bucket.list("shortcuts/"))
        assert [one.path.split("/")[1] for one in made] == ["3"]

    def test_the_end_waits_for_an_anchor_under_way(self) -> None:
        async def scene(trainer: Trainer) -> None:
            trainer.bucket.trouble("put", "anchors/", slow(100))
            await trainer.publish_all(1)

        trainer = play(scene, anchor_every=1)
        assert len(asyncio.run(trainer.bucket.list("shortcuts/"))) == 1


class TestBeginning:
    def test_a_run_that_could_not_be_started_is_started_by_the_next(self) -> None:
        async def scene() -> Trainer:
            bucket = in_memory()
            trainer = await Trainer(bucket).start()
            bucket.trouble("create", RUN, failed, times=1e9)
            assert isinstance((await over(trainer.publish())).error, Unavailable)
            bucket.calm()
            assert (await over(trainer.publish())).version == 1
            await trainer.close()
            return trainer

        trainer = quickly(scene())
        assert version_in(trainer.bucket) == digest(trainer.weights)

    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_replies_that_are_lost(self, what: Any) -> None:
        async def scene() -> Trainer:
            bucket = in_memory()
            trainer = await Trainer(bucket).start()
            for prefix in (RUN, "epochs/", "commits/"):
                bucket.trouble("create", prefix, what)
            assert (await over(trainer.publish())).version == 1
            await trainer.close()
            return trainer

        trainer = quickly(scene())
        assert [commit.epoch for commit in commits_in(trainer.bucket)] == [1, 1]

    def test_a_run_that_was_half_started_by_one_that_died(self) -> None:
        """run.json and perhaps an epoch, but no commit."""

        async def scene() -> Trainer:
            bucket = in_memory()
            first = await Trainer(bucket).start()
            bucket.trouble("create", "epochs/", denied)
            assert isinstance((await over(first.publish())).error, PermissionDenied)
            await first.close()
            second = await Trainer(bucket).start()
            assert (await over(second.publish())).version == 1
            await second.close()
            return second

        trainer = quickly(scene())
        assert version_in(trainer.bucket) == digest(trainer.weights)

    def test_two_start_a_run_at_the_same_time(self) -> None:
        async def scene() -> tuple[Troubled, list[Publication]]:
            bucket = in_memory()
            trainers = [await Trainer(bucket).start() for _ in range(2)]
            publications = [trainer.publish() for trainer in trainers]
            for publication in publications:
                await over(publication)
            for trainer in trainers:
                await trainer.close()
            return bucket, publications

        bucket, publications = quickly(scene())
        commits = commits_in(bucket)
        assert {commit.run for commit in commits} == {run_in(bucket).run}
        for publication in publications:
            if publication.version is not None:
                assert commits[publication.version].after == digest_after_one_step()
            else:
                assert isinstance(publication.error, Fenced)
        assert any(publication.version is not None for publication in publications)

    def test_a_bucket_that_cannot_be_reached(self) -> None:
        async def scene(verbs: str, prefix: str) -> None:
            bucket = in_memory()
            trainer = await Trainer(bucket).start()
            await trainer.publish_all(2)
            await trainer.close()
            bucket.trouble(verbs, prefix, failed, times=1e9)
            await Trainer(bucket).start()

        for verbs, prefix in [("create", "probe/"), ("get", RUN), ("read_into", "")]:
            with pytest.raises(Unavailable):
                quickly(scene(verbs, prefix))

    def test_a_run_that_cannot_be_claimed(self) -> None:
        """The first publish fails; a later one claims the run, once."""

        async def scene(trainer: Trainer) -> None:
            await trainer.close()
            again = await Trainer(trainer.bucket).start()
            trainer.bucket.trouble("list", "epochs/", failed, times=1e9)
            assert isinstance((await over(again.publish())).error, Unavailable)
            trainer.bucket.calm()
            assert (await over(again.publish())).version == 3
            await again.close()
            trainer.work, trainer.weights = again.work, again.weights

        assert [commit.kind for commit in commits_in(play(scene).bucket)] == ["fence", "anchor", "fence", "delta"]

    def test_a_run_is_claimed_once_however_often_it_cannot_be_read(self) -> None:
        """Another publisher went on after it was found, so that what was published must be read again."""

        async def scene(trainer: Trainer) -> None:
            again = await Trainer(trainer.bucket).start()
            await trainer.publish_all(1)
            trainer.bucket.trouble("read_into", "", failed, times=1e9)
            for _ in range(3):
                assert isinstance((await over(again.publish())).error, Unavailable)
            trainer.bucket.calm()
            assert (await over(again.publish())).version == 4
            await trainer.close()
            await again.close()
            trainer.work, trainer.weights = again.work, again.weights

        kinds = [commit.kind for commit in commits_in(play(scene).bucket)]
        assert kinds == ["fence", "anchor", "delta", "fence", "delta"]


def digest_after_one_step() -> str:
    trainer = Trainer(in_memory())
    trainer.train()
    return digest(trainer.weights).hex


class TestReplicas:
    def test_heartbeats_that_cannot_be_read_do_not_count(self) -> None:
        async def scene(trainer: Trainer) -> None:
            await trainer.bucket.put("replicas/rotten.json", b"?")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(trainer.work.wait_for_replicas(1, 1), 5)
            await trainer.work.wait_for_replicas(1, 0)

        play(scene)
