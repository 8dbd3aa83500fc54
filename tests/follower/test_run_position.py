"""A replica never goes back to an older version, even if the bucket was rolled back or replaced."""

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
from weightwire.chain.record_paths import RUN, commit_path
from weightwire.errors import (
    BrokenChain,
    ForeignRun,
    Unavailable,
)
from weightwire.telemetry.events import Event


class TestChangedBucket:
    """A follower without new versions checks now and then that its run is still there."""

    def test_follower_notices_a_rolled_back_bucket(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(4)
            scene.start()
            await eventually(lambda: scene.work.version == 4)
            gone = {version: scene.store.objects.pop(commit_path(version)) for version in (3, 4)}
            await eventually(lambda: scene.work.trouble, 60)
            assert "does not have version 4, which this replica holds" in scene.work.trouble
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
    def test_follower_notices_another_run_in_the_bucket(self, play: Play, versions: int) -> None:
        """The new run has fewer, as many or more versions than the old run."""

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
            named = f"this replica belongs to run {old[:12]}; rebuilding it for run {other.run_id[:12]}"
            assert scene.warnings.count(named) == 1
            update = await scene.take()
            assert (update.version, update.patch) == (versions, None)

        play(act)


class TestRolledBackBucket:
    def roll_back(self, bucket: Troubled, version: int) -> None:
        for path in paths(bucket, "commits/"):
            if path >= commit_path(version):
                remove(bucket, path)

    def test_rolled_back_bucket_does_not_roll_back_the_replica(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
        trainer.publish(4)
        with Follower(bucket, into=into) as follower:
            follower.once()
        before = copy_of(bucket)
        self.roll_back(bucket, 3)
        with Follower(bucket, into=into) as follower:
            with pytest.raises(BrokenChain, match="does not have version 4, which this replica holds") as caught:
                follower.once()
            assert caught.value.hint == (
                "the bucket was rolled back or replaced: if that is intended, follow it into a new directory, "
                "or publish under another URL"
            )
            assert bits_of(follower.checkpoint()) == trainer.bits[4]
            put_back(bucket, before)
            assert follower.once() == 4
            check(follower, trainer.bits, 4)

    def test_rolled_back_bucket_with_another_history_is_refused(
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
            with pytest.raises(BrokenChain, match="its version 4 is not the one that this replica holds") as caught:
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

    def test_bucket_rolled_back_while_it_is_followed_is_refused(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        """Its next version does not follow from the version held."""
        trainer.publish(4)
        follower.once()
        trainer.close()
        self.roll_back(bucket, 3)
        other = Trainer(bucket.inner)
        other.publish(3)
        other.close()
        with pytest.raises(BrokenChain, match="its parent hash differs"):
            follower.once()
        check(follower, trainer.bits, 4)

    def test_rolled_back_bucket_with_a_later_anchor_is_refused(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
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

    def test_another_run_at_the_url_is_reported_and_followed(
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
        assert warnings(heard) == [f"this replica belongs to run {names[0]}; rebuilding it for run {names[1]}"]
        assert all(event.at > 0 for event in heard)

    def test_another_run_that_cannot_be_fetched_leaves_the_replica_unchanged(
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

    def test_running_follower_refuses_another_run_until_it_is_restarted(
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
