"""The events of a follower: versions, a silent store and a missing run."""

from __future__ import annotations

import asyncio

import pytest

from support.failing_bucket import failed, slow
from support.follow_scene import ALWAYS, Play, Scene, eventually


class TestEvents:
    @pytest.mark.parametrize("way", ["rebuilt", "patched"])
    def test_a_version_is_reported_before_it_can_be_taken(self, play: Play, way: str) -> None:
        """The bytes of an update are known when it is taken."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            if way == "patched":
                await scene.look()
                await scene.take()
                await scene.publish()
            looking = asyncio.create_task(scene.work.look())
            while (update := await scene.work.take()) is None:
                await asyncio.sleep(0.001)
            assert ("apply", update.version) in [(event.stage, event.version) for event in scene.heard]
            await looking

        play(act)


class TestSilentStore:
    def test_a_silent_store_is_reported_once_with_the_lag(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(3)
            scene.bucket.trouble("read_into", "deltas/", slow(60), times=3)
            scene.start()
            await eventually(lambda: scene.work.version == 4)
            url = scene.bucket.url
            assert scene.warnings == [f"{url} has not answered for 5 s (3 versions behind); still waiting"]
            recovered = [event.message for event in scene.heard if event.stage == "recovered"]
            assert len(recovered) == 1
            assert recovered[0].startswith(f"{url} answers again after 60 s")

        play(act)

    def test_a_warning_includes_how_far_the_replica_is_behind(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(2)
            scene.bucket.trouble("read_into", "deltas/", failed, times=2)
            scene.start()
            await eventually(lambda: scene.work.version == 3)
            assert scene.warnings == ["the request failed (2 versions behind)"]

        play(act)


class TestOutage:
    def test_an_outage_counts_from_the_last_look_that_succeeded(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            assert scene.work.outage == 0
            await asyncio.sleep(300)
            assert scene.work.outage == 0  # nothing new is not an outage
            scene.bucket.trouble("get find list read_into", "", failed, ALWAYS)
            await eventually(lambda: bool(scene.work.trouble))
            await asyncio.sleep(100)
            assert 100 <= scene.work.outage < 300
            scene.bucket.calm()
            await eventually(lambda: scene.work.outage == 0)

        play(act)

    def test_a_look_that_hangs_is_an_outage(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            scene.bucket.trouble("get", "", slow(60), times=1)
            looking = asyncio.create_task(scene.work.look())
            await asyncio.sleep(1)
            assert scene.work.outage == 0
            await asyncio.sleep(30)
            assert scene.work.outage >= 30
            await looking
            assert scene.work.outage == 0

        play(act)


class TestMissingRun:
    def test_a_follower_reports_once_that_it_waits_for_a_run(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            await asyncio.sleep(600)
            waiting = f"{scene.bucket.url}: nothing has been published there yet; waiting for a run"
            assert [message.split("\n")[0] for message in scene.warnings] == [waiting]
            assert scene.work.trouble == waiting
            await scene.publish()
            await eventually(lambda: scene.work.version == 1 and not scene.work.trouble)

        play(act)
