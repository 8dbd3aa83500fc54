"""What a follower tells about itself: how far it is, what is wrong, and that it has stopped."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from support.failing_bucket import Troubled, denied, failed, slow
from support.follow_scene import NAME, Play, Scene, eventually
from support.followers import ALWAYS, Trainer, beat_in, check, commit_in, ignore, paths, read, warnings, write
from weightwire import Follower
from weightwire.chain.records import (
    RUN,
    Heartbeat,
    PassedVersion,
    commit_path,
    heartbeat_path,
    seal,
)
from weightwire.follower import stage_timings
from weightwire.telemetry.events import Event


async def in_trouble(scene: Scene) -> None:
    """It follows, holds version 1, and cannot read version 2."""
    await scene.publish()
    scene.start()
    await eventually(lambda: scene.work.version == 1)
    scene.write(commit_path(2), b"hello")
    await eventually(lambda: scene.work.trouble)


class TestHeartbeats:
    def test_come_after_each_version(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            for version in range(1, 5):
                await scene.publish()
                await eventually(lambda version=version: scene.work.version == version)  # type: ignore[misc]
                await asyncio.sleep(0.5)
                assert (scene.beat.version, scene.beat.head) == (version, version)

        play(act)

    def test_come_while_nothing_does(self, play: Play) -> None:
        """Several within a lease, so that one may be lost."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            await asyncio.sleep(1)
            scene.bucket.asked.clear()
            await asyncio.sleep(scene.beat.lease * 10)
            assert 35 <= scene.bucket.count("put", "replicas/") <= 41

        play(act)

    def test_say_what_is_wrong(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            good = scene.store.objects.pop(commit_path(3))
            scene.start()
            await eventually(lambda: scene.work.version == 2)
            scene.write(commit_path(3), b"hello")
            await eventually(lambda: scene.work.trouble)
            await asyncio.sleep(20)
            assert (scene.beat.version, scene.beat.trouble) == (2, scene.work.trouble)
            scene.store.objects[commit_path(3)] = good
            await eventually(lambda: scene.work.version == 3)
            await asyncio.sleep(20)
            assert (scene.beat.version, scene.beat.trouble) == (3, "")

        play(act)

    def test_say_at_once_that_trouble_is_over(self, play: Play) -> None:
        """Before the next one would be due."""

        async def act(scene: Scene) -> None:
            await in_trouble(scene)
            await asyncio.sleep(1)
            assert scene.beat.trouble == scene.work.trouble
            scene.remove(commit_path(2))
            scene.work.wake()
            await eventually(lambda: not scene.work.trouble)
            await asyncio.sleep(1)
            assert scene.beat.trouble == ""

        play(act)

    def test_come_at_once_after_a_restart_without_news(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            scene.replica.close()
            scene.open()
            scene.start()
            await asyncio.sleep(3)
            assert scene.beat.version == 1

        play(act)

    def test_end_with_one_that_ends_the_lease(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(2)
            scene.start()
            await eventually(lambda: scene.work.version == 2)
            await asyncio.sleep(1)
            assert not scene.beat.stopped
            await scene.stop()
            await scene.work.stop_beating()
            assert scene.beat.stopped
            assert (scene.beat.version, scene.beat.lease, scene.beat.trouble) == (2, 0.0, "")
            assert [one.version for one in scene.beat.recent] == [1, 2]

        play(act)

    def test_end_without_trouble(self, play: Play) -> None:
        """Whoever has stopped is not in trouble any more."""

        async def act(scene: Scene) -> None:
            await in_trouble(scene)
            await scene.stop()
            await scene.work.stop_beating()
            assert (scene.beat.stopped, scene.beat.trouble) == (True, "")

        play(act)

    def test_never_follow_the_last_one(self, play: Play) -> None:
        """One that is still being written lands before it."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            scene.bucket.trouble("put", "replicas/", slow(5), 1)
            beating = asyncio.create_task(scene.work.beat())
            await asyncio.sleep(1)
            await scene.work.stop_beating()
            await beating
            assert scene.beat.stopped

        play(act)

    def test_of_one_that_never_said_anything_have_no_last_one(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.work.stop_beating()
            assert heartbeat_path(NAME) not in scene.store.objects

        play(act)

    def test_of_one_that_cannot_begin_go_on_telling_of_the_versions_before(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.work.beat()
            told = scene.beat.recent
            assert told
            scene.replica.close()
            scene.remove(commit_path(3))
            scene.open()
            scene.start()
            await eventually(lambda: scene.work.trouble)
            await asyncio.sleep(1)
            assert (scene.beat.version, scene.beat.recent) == (-1, told)

        play(act)

    def test_that_are_denied_are_tried_again(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.trouble("put", "replicas/", denied, ALWAYS)
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            await asyncio.sleep(300)
            assert scene.warnings == ["this key may not write, so nobody sees how far this follower is"]
            await scene.publish()
            await eventually(lambda: scene.work.version == 2)
            assert heartbeat_path(NAME) not in scene.store.objects
            scene.bucket.calm()
            await asyncio.sleep(20)
            assert scene.beat.version == 2
            scene.bucket.trouble("put", "replicas/", denied, ALWAYS)
            await asyncio.sleep(20)
            assert len(scene.warnings) == 2  # it was allowed in between

        play(act)

    def test_that_get_lost_are_no_trouble(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.trouble("put", "replicas/", failed, 3)
            await scene.publish()
            scene.start()
            await asyncio.sleep(60)
            assert scene.beat.version == 1
            assert scene.warnings == []

        play(act)

    def test_of_one_that_cannot_begin_say_why(self, play: Play) -> None:
        """A replica ahead of the bucket keeps serving, and whoever looks sees why it does not move."""

        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            scene.replica.close()
            scene.remove(commit_path(3))
            scene.open()
            scene.start()
            await eventually(lambda: scene.work.trouble)
            await asyncio.sleep(60)
            assert "rolled back" in scene.warnings[0]
            assert scene.beat.trouble == scene.work.trouble

        play(act)


class TestTheHeartbeatOfAFollower:
    def test_says_how_far_it_is(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        began = time.time()
        for version in (1, 2):
            trainer.publish()
            follower.once()
            beat = beat_in(bucket, "rollout-1")
            assert (beat.name, beat.version, beat.head, beat.trouble) == ("rollout-1", version, version, "")
            assert beat.run == json.loads(read(bucket, RUN))["run"]
            assert began <= beat.time <= time.time()
            assert beat.lease >= 10
            assert {"discover", "apply"} <= set(beat.stages)
            assert beat.stages["apply"].bytes == commit_in(bucket, version).nbytes

    def test_tells_of_the_last_versions_also_after_a_restart(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(3):
            trainer.publish()
            follower.once()
        told = beat_in(bucket, "rollout-1").recent
        assert [one.version for one in told] == [1, 2, 3]
        for one in told:
            stages = one.stages
            assert stages["fetch"].bytes == stages["apply"].bytes == commit_in(bucket, one.version).nbytes
            assert 0 < stages["discover"].at <= stages["fetch"].at <= stages["verify"].at <= stages["apply"].at
        follower.close()
        trainer.publish()
        with Follower(bucket, into=into, name="rollout-1", on_event=ignore) as again:
            again.once()
            assert beat_in(bucket, "rollout-1").recent[:3] == told
            assert beat_in(bucket, "rollout-1").recent[3].version == 4
            monkeypatch.setattr(stage_timings, "_RECENT", 2)
            trainer.publish()
            again.once()
            assert [one.version for one in beat_in(bucket, "rollout-1").recent] == [4, 5]

    def test_that_another_wrote_in_its_name_pushes_nothing_out(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        trainer.publish()
        run = json.loads(read(bucket, RUN))["run"]
        recent = tuple(PassedVersion(10**15 + number, {}) for number in range(100))
        forged = Heartbeat(run=run, name="rollout-1", version=1, head=1, lease=60.0, recent=recent)
        write(bucket, heartbeat_path("rollout-1"), seal(forged).data)
        follower.once()
        assert [one.version for one in beat_in(bucket, "rollout-1").recent] == [1]

    def test_is_what_the_publisher_waits_for(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.start()
        assert trainer.publisher.wait(replicas=1, timeout=20) == 1
        trainer.publish()
        assert trainer.publisher.wait(replicas=1, timeout=20) == 2

    def test_that_is_denied_stops_nobody(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
        bucket.trouble("put", "replicas/", denied, ALWAYS)
        for version in (1, 2):
            trainer.publish()
            assert follower.once() == version
            check(follower, trainer.bits, version)
        assert warnings(heard) == ["this key may not write, so nobody sees how far this follower is"]
        assert not paths(bucket, "replicas/")
        bucket.calm()
        follower.once()
        assert beat_in(bucket, "rollout-1").version == 2
