"""Heartbeats: the version, trouble and end of a follower."""

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
from weightwire.chain.record_paths import RUN, commit_path, heartbeat_path
from weightwire.chain.records import Heartbeat, PassedVersion, seal
from weightwire.follower import stage_timings
from weightwire.telemetry.events import Event


async def in_trouble(scene: Scene) -> None:
    """Follows to version 1, and cannot read version 2."""
    await scene.publish()
    scene.start()
    await eventually(lambda: scene.work.version == 1)
    scene.write(commit_path(2), b"hello")
    await eventually(lambda: scene.work.trouble)


class TestHeartbeats:
    def test_heartbeat_is_written_after_each_version(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            for version in range(1, 5):
                await scene.publish()
                await eventually(lambda version=version: scene.work.version == version)  # type: ignore[misc]
                await asyncio.sleep(0.5)
                assert (scene.beat.version, scene.beat.head) == (version, version)

        play(act)

    def test_heartbeats_are_written_without_new_versions(self, play: Play) -> None:
        """Several per lease, so that one may be lost."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            await asyncio.sleep(1)
            scene.bucket.asked.clear()
            await asyncio.sleep(scene.beat.lease * 10)
            assert 35 <= scene.bucket.count("put", "replicas/") <= 41

        play(act)

    def test_heartbeat_reports_trouble(self, play: Play) -> None:
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

    def test_heartbeat_reports_a_recovery_at_once(self, play: Play) -> None:
        """Before the next regular heartbeat."""

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

    def test_heartbeat_is_written_at_once_after_a_restart(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            scene.replica.close()
            scene.open()
            scene.start()
            await asyncio.sleep(3)
            assert scene.beat.version == 1

        play(act)

    def test_heartbeat_and_lease_stay_until_the_version_is_found_after_a_restart(self, play: Play) -> None:
        """Without them, gc could delete what the follower needs next."""

        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.work.beat()
            scene.replica.close()
            scene.bucket.trouble("get", commit_path(3), failed, ALWAYS)
            scene.open()
            scene.start()
            await eventually(lambda: scene.work.trouble)
            await asyncio.sleep(1)
            assert (scene.beat.version, scene.beat.trouble) == (3, "")
            scene.bucket.calm()
            await eventually(lambda: scene.work.version == 3)

        play(act)

    def test_last_heartbeat_ends_the_lease(self, play: Play) -> None:
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

    def test_last_heartbeat_keeps_the_trouble(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await in_trouble(scene)
            trouble = scene.work.trouble
            scene.work.report_served(1, "vllm: gone", {})
            await scene.stop()
            await scene.work.stop_beating()
            assert scene.beat.stopped
            assert scene.beat.trouble == f"{trouble}; vllm: gone"

        play(act)

    def test_no_heartbeat_is_written_after_the_last(self, play: Play) -> None:
        """A heartbeat that is still being written lands before the last."""

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

    def test_a_follower_without_heartbeats_writes_no_last_heartbeat(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.work.stop_beating()
            assert heartbeat_path(NAME) not in scene.store.objects

        play(act)

    def test_heartbeat_keeps_its_history_while_the_follower_cannot_start(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.work.beat()
            recent = scene.beat.recent
            assert recent
            scene.replica.close()
            scene.remove(commit_path(3))
            scene.open()
            scene.start()
            await eventually(lambda: scene.work.trouble)
            await asyncio.sleep(1)
            assert (scene.beat.version, scene.beat.recent) == (-1, recent)

        play(act)

    def test_denied_heartbeats_are_retried(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.trouble("put", "replicas/", denied, ALWAYS)
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            await asyncio.sleep(300)
            assert scene.warnings == ["this key has no write permission, so this follower writes no heartbeats"]
            await scene.publish()
            await eventually(lambda: scene.work.version == 2)
            assert heartbeat_path(NAME) not in scene.store.objects
            scene.bucket.calm()
            await asyncio.sleep(20)
            assert scene.beat.version == 2
            scene.bucket.trouble("put", "replicas/", denied, ALWAYS)
            await asyncio.sleep(20)
            assert len(scene.warnings) == 2  # it was permitted in between

        play(act)

    def test_failed_heartbeats_are_not_reported(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.trouble("put", "replicas/", failed, 3)
            await scene.publish()
            scene.start()
            await asyncio.sleep(60)
            assert scene.beat.version == 1
            assert scene.warnings == []

        play(act)

    def test_heartbeat_reports_why_the_follower_cannot_start(self, play: Play) -> None:
        """A replica ahead of the bucket keeps serving, and its heartbeat shows the reason."""

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


class TestFollowerHeartbeat:
    def test_heartbeat_has_version_and_head(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
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

    def test_heartbeat_keeps_recent_versions_over_a_restart(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(3):
            trainer.publish()
            follower.once()
        recent = beat_in(bucket, "rollout-1").recent
        assert [one.version for one in recent] == [1, 2, 3]
        for one in recent:
            stages = one.stages
            assert stages["fetch"].bytes == stages["apply"].bytes == commit_in(bucket, one.version).nbytes
            assert 0 < stages["discover"].at <= stages["fetch"].at <= stages["verify"].at <= stages["apply"].at
        follower.close()
        trainer.publish()
        with Follower(bucket, into=into, name="rollout-1", on_event=ignore) as again:
            again.once()
            assert beat_in(bucket, "rollout-1").recent[:3] == recent
            assert beat_in(bucket, "rollout-1").recent[3].version == 4
            monkeypatch.setattr(stage_timings, "_RECENT", 2)
            trainer.publish()
            again.once()
            assert [one.version for one in beat_in(bucket, "rollout-1").recent] == [4, 5]

    def test_foreign_versions_do_not_displace_recent_ones(
        self, bucket: Troubled, trainer: Trainer, follower: Follower
    ) -> None:
        trainer.publish()
        run = json.loads(read(bucket, RUN))["run"]
        recent = tuple(PassedVersion(10**15 + number, {}) for number in range(100))
        forged = Heartbeat(run=run, name="rollout-1", version=1, head=1, lease=60.0, recent=recent)
        write(bucket, heartbeat_path("rollout-1"), seal(forged).data)
        follower.once()
        assert [one.version for one in beat_in(bucket, "rollout-1").recent] == [1]

    def test_publisher_waits_for_heartbeats(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.start()
        assert trainer.publisher.wait(replicas=1, timeout=90) == 1
        trainer.publish()
        assert trainer.publisher.wait(replicas=1, timeout=90) == 2

    def test_denied_heartbeat_does_not_stop_the_follower(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
        bucket.trouble("put", "replicas/", denied, ALWAYS)
        for version in (1, 2):
            trainer.publish()
            assert follower.once() == version
            check(follower, trainer.bits, version)
        assert warnings(heard) == ["this key has no write permission, so this follower writes no heartbeats"]
        assert not paths(bucket, "replicas/")
        bucket.calm()
        follower.once()
        assert beat_in(bucket, "rollout-1").version == 2


class TestSharedName:
    def test_once_leaves_the_heartbeat_of_a_running_follower_alone(
        self, trainer: Trainer, follower: Follower, bucket: Troubled, tmp_path: Path
    ) -> None:
        trainer.publish()
        follower.once()
        before = read(bucket, heartbeat_path("rollout-1"))
        heard: list[Event] = []
        with Follower(bucket, into=tmp_path / "other", name="rollout-1", threads=1, on_event=heard.append) as other:
            assert other.once() == 1
        assert read(bucket, heartbeat_path("rollout-1")) == before
        assert warnings(heard) == ["a running follower uses the same name, so this one writes no heartbeat"]

    def test_once_takes_over_the_name_of_a_stopped_follower(
        self, trainer: Trainer, bucket: Troubled, tmp_path: Path
    ) -> None:
        trainer.publish()
        heard: list[Event] = []
        for directory in ("first", "second"):
            with Follower(bucket, into=tmp_path / directory, name="one", threads=1, on_event=heard.append) as follower:
                follower.once()
                follower.once()
                assert not beat_in(bucket, "one").stopped
        assert beat_in(bucket, "one").stopped
        assert not warnings(heard)
