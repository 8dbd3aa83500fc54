"""Bringing a replica forward: rebuilds, interrupts, a replica that is lost, and when `current` is made."""

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
    lose,
    now,
)
from support.small_run import bits_of
from weightwire.chain.records import (
    commit_path,
)
from weightwire.errors import ReplicaError, Unavailable, WeightwireError
from weightwire.follower import replica_updater


class TestARebuild:
    def test_that_is_interrupted_leaves_what_was_held(self, play: Play) -> None:
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

    def test_that_is_cancelled_leaves_what_was_held(self, play: Play) -> None:
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

    def test_follows_the_loss_of_a_replica(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is in memory cannot be relied on any more: all weights come anew."""

        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.take()
            await scene.publish()
            lose(scene, monkeypatch)
            with pytest.raises(ReplicaError, match="half-way"):
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

    def test_of_a_damaged_replica_is_announced(self, play: Play) -> None:
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


class TestALostReplica:
    """Until it is rebuilt, there is nothing to take and nothing to load."""

    def test_hands_out_nothing(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_lets_engines_wait(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """And does not keep a core busy."""

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
            assert now() >= began + 1.0  # the sum that the loop makes: a difference may be a bit less

        play(act)

    def test_never_goes_back(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """Though the bucket was rolled back in the meantime."""

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


class TestAnInterrupt:
    def test_while_a_version_is_applied_costs_nothing(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """As Ctrl-C in once(), after which it is called again."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(2)
            looking = asyncio.create_task(scene.work.look())

            async def run_in_thread(
                self: SimRuntime, function: Callable[..., Result], *args: Any, **kwargs: Any
            ) -> Result:
                """A thread is waited for; whoever was cancelled meanwhile does not hear what became of it."""
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
    def test_of_a_small_replica_is_always_the_newest(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            for version in (1, 2, 3):
                await scene.publish()
                await scene.look()
                assert bits_of(scene.into / "current") == scene.bits[version]

        play(act)

    def test_of_a_large_one_is_made_now_and_then(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        """When so much has changed since that a crash would cost more than to write it."""
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
