"""Advancing a replica: rebuilds, interrupts, a lost replica, and `current`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from faults.simulated_runtime import SimRuntime
from support.failing_bucket import Act, failed
from support.follow_scene import (
    ALWAYS,
    Play,
    Result,
    Scene,
    eventually,
    lose,
    now,
)
from support.small_run import bits_of
from weightwire.chain.record_paths import commit_path
from weightwire.errors import ReplicaError, Unavailable, WeightwireError
from weightwire.follower import replica_updater


class TestRebuild:
    def test_interrupted_rebuild_leaves_the_version_held(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            for requests in range(1, 12, 3):
                scene.bucket.calm()
                count = 0

                async def break_off(do: Act, requests: int = requests) -> Any:
                    nonlocal count
                    count += 1
                    return await (failed(do) if count == requests else do())

                scene.bucket.trouble("read_into", "", break_off, ALWAYS)
                with pytest.raises(Unavailable):
                    await scene.look()
                scene.check(1)
                assert len(list((scene.into / "works").iterdir())) == 1
            scene.bucket.calm()
            await scene.look()
            scene.check(91)

        play(act, anchor_every=20)

    def test_cancelled_rebuild_leaves_the_version_held(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            for seconds in (0.3, 0.6, 0.9, 1.2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(scene.work.look(), seconds)
                scene.check(1)
            await scene.look()
            scene.check(91)

        play(act, anchor_every=20)

    def test_lost_replica_is_rebuilt(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """The memory can no longer be trusted, so all weights are rebuilt."""

        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.take()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError, match="halfway"):
                await scene.look()
            assert scene.replica.position is None
            await scene.look()
            scene.check(4)
            update = await scene.take()
            assert (update.version, update.patch) == (4, None)
            await scene.publish()
            await scene.look()
            scene.check(5)

        play(act)

    def test_rebuild_of_a_damaged_replica_is_reported(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            scene.replica.close()
            with (scene.into / "work" / "model.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"?")
            scene.open()
            scene.heard.clear()
            assert await scene.look() == ["anchors/1", "deltas/2", "deltas/3"]
            [warning] = scene.warnings
            assert "damaged" in warning
            scene.check(3)

        play(act)


class TestLostReplica:
    """Until it is rebuilt, it has neither an update nor a checkpoint."""

    def test_lost_replica_hands_out_no_update(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            await scene.publish(2)
            await scene.look()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError):
                await scene.look()
            assert await scene.work.take() is None

        play(act)

    def test_engines_wait_for_a_lost_replica(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """They do not busy-wait."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError):
                await scene.look()
            scene.bucket.trouble("get find list", "", failed, ALWAYS)
            with pytest.raises(Unavailable):
                await scene.look()
            assert await scene.work.take() is None
            began = now()
            await scene.work.wait_for_more(1.0)
            await scene.work.wait_for_more(1.0)
            assert now() >= began + 1.0  # a difference may be slightly smaller by rounding

        play(act)

    def test_lost_replica_is_never_rebuilt_at_an_older_version(
        self, play: Play, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The bucket was rolled back meanwhile."""

        async def act(scene: Scene) -> None:
            await scene.publish(4)
            await scene.look()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError):
                await scene.look()
            for version in (3, 4, 5):
                scene.remove(commit_path(version))
            with pytest.raises(WeightwireError):
                await scene.look()

        play(act)


class TestInterrupt:
    def test_interrupt_while_a_version_is_applied_loses_nothing(
        self, play: Play, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C interrupts once(), which is then called again."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(2)
            looking = asyncio.create_task(scene.work.look())

            async def run_in_thread(
                self: SimRuntime, function: Callable[..., Result], *args: Any, **kwargs: Any
            ) -> Result:
                """Waits for the thread. A cancelled caller does not get its result."""
                result = function(*args, **kwargs)
                if function == scene.replica.advance:
                    looking.cancel()
                    await asyncio.sleep(0)
                return result

            with monkeypatch.context() as patched:
                patched.setattr(SimRuntime, "run_in_thread", run_in_thread)
                with pytest.raises(asyncio.CancelledError):
                    await looking
            await scene.look()
            scene.check(3)

        play(act)


class TestCurrent:
    def test_current_of_a_small_replica_is_always_the_newest_version(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            for version in (1, 2, 3):
                await scene.publish()
                await scene.look()
                assert bits_of(scene.into / "current") == scene.bits[version]

        play(act)

    def test_current_of_a_large_replica_is_made_now_and_then(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is made once a replay of the journal would cost more than writing it."""
        monkeypatch.setattr(replica_updater, "_SMALL", 0)

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.work.checkpoint()
            made, most = [1], sum(array.nbytes for array in scene.weights.values()) // 4
            for _ in range(18):
                await scene.publish()
                await scene.look()
                assert scene.replica.journal_bytes <= most
                made.append(int((scene.into / "current").resolve().name.split("-")[0]))
            assert 2 <= len({*made}) <= 6
            assert bits_of(scene.into / "current") == scene.bits[made[-1]]

        play(act)

    def test_versions_are_reached_while_current_of_a_large_replica_is_made(
        self, play: Play, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replica_updater, "_SMALL", 0)
        made: list[int] = []

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            await scene.work.checkpoint()
            runtime = scene.work._context.runtime
            in_thread = runtime.run_in_thread

            async def slowly(function: Any, *args: Any, **kwargs: Any) -> Any:
                if function.__name__ != "make_beside":
                    return await in_thread(function, *args, **kwargs)
                await asyncio.sleep(500)
                made.append(scene.work.version or 0)
                return function(*args, **kwargs)

            monkeypatch.setattr(runtime, "run_in_thread", slowly)
            await scene.publish(40, pause=30)
            await eventually(lambda: scene.work.version == 41)
            assert made
            assert made[0] > 10
            shown = int((scene.into / "current").resolve().name.split("-")[0])
            assert 1 < shown < 41
            assert bits_of(scene.into / "current") == scene.bits[shown]
            await scene.work.checkpoint()
            assert bits_of(scene.into / "current") == scene.bits[41]
            assert scene.warnings == []

        play(act)

    def test_follower_that_stops_while_current_is_made_leaves_nothing(
        self, play: Play, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replica_updater, "_SMALL", 0)

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            await scene.work.make_current()
            runtime = scene.work._context.runtime
            in_thread, begun = runtime.run_in_thread, []

            async def never(function: Any, *args: Any, **kwargs: Any) -> Any:
                if function.__name__ == "make_beside":
                    begun.append(scene.work.version)
                    await asyncio.sleep(1e9)
                return await in_thread(function, *args, **kwargs)

            monkeypatch.setattr(runtime, "run_in_thread", never)
            await scene.publish(10, pause=30)
            await eventually(lambda: begun)
            await scene.stop()
            await scene.work.make_current()
            assert bits_of(scene.into / "current") == scene.bits[scene.work.version or 0]
            assert len(list((scene.into / "checkpoints").iterdir())) == 1

        play(act)

    def test_damaged_current_is_reported_and_made_from_the_weights(
        self, play: Play, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replica_updater, "_SMALL", 0)

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            model = await scene.work.checkpoint() / "model.safetensors"
            data = bytearray(model.read_bytes())
            data[-5] ^= 1
            model.write_bytes(data)
            await scene.publish(20, pause=30)
            await eventually(lambda: scene.work.version == 21)
            assert len(scene.warnings) == 1
            assert "`current` was not renewed" in scene.warnings[0]
            assert "was damaged" in scene.warnings[0]
            shown = int((scene.into / "current").resolve().name.split("-")[0])
            assert shown > 1
            assert bits_of(scene.into / "current") == scene.bits[shown]

        play(act)
