"""A bucket that was rolled back or replaced never takes a replica back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.failing_bucket import Troubled, failed
from support.follow_scene import Play, Scene, eventually
from support.followers import (
    ALWAYS,
    Trainer,
    check,
    copy_of,
    current,
    ignore,
    paths,
    put_back,
    read,
    remove,
    taken,
    until,
    warnings,
)
from support.small_run import bits_of
from weightwire import Follower
from weightwire.chain.records import (
    RUN,
    commit_path,
)
from weightwire.errors import (
    BrokenChain,
    ForeignRun,
    Unavailable,
)
from weightwire.telemetry.events import Event


class TestABucketThatChanges:
    """Under a follower that has seen nothing new for a while, and so must look whether all is as it was."""

    def test_was_rolled_back(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(4)
            scene.start()
            await eventually(lambda: scene.work.version == 4)
            gone = {version: scene.store.objects.pop(commit_path(version)) for version in (3, 4)}
            await eventually(lambda: scene.work.trouble, 60)
            assert "has no version 4, which this replica holds; it stays as it is" in scene.work.trouble
            await asyncio.sleep(300)
            assert len(scene.warnings) == 1
            assert bits_of(scene.replica.weights) == scene.bits[4]
            for version, commit in gone.items():
                scene.store.objects[commit_path(version)] = commit
            await scene.publish()
            await eventually(lambda: scene.work.version == 5 and not scene.work.trouble, 60)
            scene.check(5)

        play(act)

    @pytest.mark.parametrize("versions", [2, 4, 8])
    def test_holds_another_run(self, play: Play, versions: int) -> None:
        """With fewer versions than the old one, as many, or more."""

        async def act(scene: Scene) -> None:
            await scene.publish(4)
            scene.start()
            await eventually(lambda: scene.work.version == 4)
            await scene.take()
            old = scene.run_id
            other = Scene(scene.into.with_name("other"), seed=8)
            other.replica.close()
            other.weights["norm"][:] = 17
            await other.publish(versions)
            scene.store.objects.clear()
            scene.store.objects.update(other.store.objects)
            await eventually(lambda: bits_of(scene.replica.weights) == other.bits[versions], 120)
            await eventually(lambda: scene.work.version == versions and not scene.work.trouble, 60)
            named = f"this replica is of run {old[:12]}; rebuilding it for {other.run_id[:12]}"
            assert scene.warnings.count(named) == 1
            update = await scene.take()
            assert (update.version, update.patch) == (versions, None)

        play(act)


class TestABucketThatWasRolledBack:
    def roll_back(self, bucket: Troubled, version: int) -> None:
        for path in paths(bucket, "commits/"):
            if path >= commit_path(version):
                remove(bucket, path)

    def test_does_not_take_the_replica_back(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        before = copy_of(bucket)
        self.roll_back(bucket, 3)
        with Follower(bucket, into=into) as follower:
            with pytest.raises(BrokenChain, match="has no version 4, which this replica holds; it stays") as caught:
                follower.once()
            assert caught.value.hint == "the bucket was rolled back or replaced: follow it into a new directory"
            assert bits_of(follower.checkpoint()) == trainer.bits[4]
            put_back(bucket, before)
            assert follower.once() == 4
            check(follower, trainer.bits, 4)

    def test_and_has_another_history_is_refused(
        self, bucket: Troubled, trainer: Trainer, into: Path, heard: list[Event]
    ) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner)
        other.publish(3)
        other.close()
        with Follower(bucket, into=into, on_event=heard.append) as follower:
            with pytest.raises(BrokenChain, match="has another version 4 than this replica; it stays") as caught:
                follower.once()
            assert caught.value.hint
            follower.start()
            until(lambda: follower.trouble)
            assert current(into) == 4
            assert bits_of(follower.checkpoint()) == trainer.bits[4]
        assert len(warnings(heard)) == 1
        with Follower(bucket, into=into.with_name("another")) as follower:
            assert follower.once() == 6
            check(follower, other.bits, 6)

    def test_while_it_is_followed_is_refused(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """What comes then does not follow from what is held."""
        trainer.publish(4)
        follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner)
        other.publish(3)
        other.close()
        with pytest.raises(BrokenChain, match="its parent hash is another"):
            follower.once()
        check(follower, trainer.bits, 4)

    def test_and_has_a_later_anchor_is_refused(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(4)
        follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner, anchor_every=10)
        other.publish(80)
        other.close()
        with pytest.raises(BrokenChain):
            follower.once()
        check(follower, trainer.bits, 4)


class TestAnotherRun:
    @pytest.fixture
    def other(self, bucket: Troubled) -> Iterator[Trainer]:
        other = Trainer(bucket.inner)
        other.weights["norm"][:] = 17
        yield other
        other.close()

    def test_under_the_url_is_named_and_followed(
        self, bucket: Troubled, trainer: Trainer, other: Trainer, into: Path, heard: list[Event]
    ) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        names = [json.loads(read(bucket, RUN))["run"][:12]]
        trainer.close()
        remove(bucket, "")
        other.publish(2)
        names.append(json.loads(read(bucket, RUN))["run"][:12])
        with Follower(bucket, into=into, on_event=heard.append) as follower:
            assert follower.once() == 2
            check(follower, other.bits, 2)
            update = taken(follower)
            assert update.patch is None
        assert warnings(heard) == [f"this replica is of run {names[0]}; rebuilding it for {names[1]}"]
        assert all(event.at > 0 for event in heard)

    def test_that_cannot_be_fetched_leaves_the_replica_as_it_is(
        self, bucket: Troubled, trainer: Trainer, other: Trainer, into: Path
    ) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        trainer.close()
        remove(bucket, "")
        other.publish(2)
        bucket.trouble("read_into", "", failed, ALWAYS)
        with Follower(bucket, into=into, on_event=ignore) as follower:
            with pytest.raises(Unavailable):
                follower.once()
            assert current(into) == 4
            assert follower.version is None
            bucket.calm()
            assert follower.once() == 2
            check(follower, other.bits, 2)

    def test_while_it_is_followed_needs_a_second_look(
        self, bucket: Troubled, trainer: Trainer, other: Trainer, follower: Follower, into: Path
    ) -> None:
        trainer.publish(4)
        follower.once()
        trainer.close()
        remove(bucket, "")
        other.publish(6)
        with pytest.raises(ForeignRun, match="belongs to run"):
            follower.once()
        check(follower, trainer.bits, 4)
        follower.close()
        with Follower(bucket, into=into, on_event=ignore) as again:
            assert again.once() == 6
            check(again, other.bits, 6)
