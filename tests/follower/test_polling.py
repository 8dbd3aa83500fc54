"""How often a follower looks for new versions."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from support.failing_bucket import Act, Trouble, failed
from support.follow_scene import (
    ALWAYS,
    Play,
    Scene,
    eventually,
    now,
)
from weightwire.chain.record_paths import commit_path


class Looks:
    """Records when the bucket was asked for the next commit."""

    def __init__(self, scene: Scene, what: Trouble | None = None) -> None:
        self.times: list[float] = []

        async def note(do: Act) -> Any:
            began, data = now(), None
            try:
                data = await (what(do) if what else do())
                return data
            finally:
                held = scene.work.commit.data if scene.work.commit else b""
                # Not a check of the current commit, and not one of several commits that are read at once.
                if data != held and (not self.times or began - self.times[-1] > 0.14):
                    self.times.append(began)

        scene.bucket.trouble("get", "commits/", note, ALWAYS)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class TestPolling:
    """Each interval is between 75% and 125% of its nominal length."""

    def test_polling_is_fast_at_first(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            looks = Looks(scene)
            await asyncio.sleep(5)
            assert len(looks.gaps()) > 15
            assert min(looks.gaps()) >= 0.15
            assert max(looks.gaps()) <= 0.25 + 0.3  # plus the request

        play(act)

    def test_poll_interval_is_a_fifth_of_the_time_between_unsteady_versions(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()

            async def publish() -> None:
                for pause in (20, 12, 28, 14, 26) * 3:
                    await scene.publish(1, pause=pause)

            publishing = asyncio.create_task(publish())
            await eventually(lambda: scene.work.version == 6)
            looks = Looks(scene)
            await eventually(lambda: scene.work.version == 12)
            apart = [gap for gap in looks.gaps() if gap > 1]  # shorter gaps belong to the same look
            assert len(apart) >= 20
            assert 2 <= min(apart) <= max(apart) <= 7.5
            await publishing

    def test_regular_versions_are_looked_for_when_they_are_expected(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            publishing = asyncio.create_task(scene.publish(20, pause=20))
            await eventually(lambda: scene.work.version == 12)
            looks, before = Looks(scene), now()
            await eventually(lambda: scene.work.version == 16)
            assert len([gap for gap in looks.gaps() if gap > 1]) <= 4 * 4
            reached = [event.at for event in scene.heard if event.stage == "apply" and (event.version or 0) > 12]
            committed = [scene.commit(version).time for version in range(13, 17)]
            assert max(at - time for at, time in zip(reached, committed, strict=True)) <= 2
            assert now() - before < 85
            await publishing

        play(act)

    def test_polling_slows_down_without_new_versions(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await eventually(lambda: scene.work.version == 3)
            looks = Looks(scene)
            await asyncio.sleep(100)
            assert 1 < max(looks.gaps()) < 4
            await asyncio.sleep(3000)
            recent = looks.gaps()[-40:]
            assert 30 * 0.75 <= min(recent) <= max(recent) <= 30 * 1.25 + 0.3
            assert max(recent) - min(recent) > 5  # jitter keeps followers out of step

        play(act)

    def test_polling_is_fast_again_when_versions_arrive(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)
            publishing = asyncio.create_task(scene.publish(30, pause=5))
            await eventually(lambda: scene.work.version == 20)
            looks = Looks(scene)
            await eventually(lambda: scene.work.version == 25)
            apart = [gap for gap in looks.gaps() if gap > 0.5]
            assert max(apart) < 3
            await publishing

        play(act)

    def test_polling_respects_the_poll_interval_of_the_bucket(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.poll_interval = 2.0
            scene.replica.close()
            scene.open()
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            looks = Looks(scene)
            await asyncio.sleep(20)
            assert len(looks.gaps()) > 5
            assert min(looks.gaps()) >= 1.5

        play(act)

    def test_polling_slows_down_after_failures(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            looks = Looks(scene, failed)
            await asyncio.sleep(600)
            gaps = looks.gaps()
            assert gaps[0] < 1
            assert gaps[2] > 2 * gaps[0]
            assert 30 * 0.75 <= min(gaps[-5:]) <= max(gaps[-5:]) <= 30 * 1.25 + 0.3
            assert len(scene.warnings) == 1
            scene.bucket.calm()
            await scene.publish()
            await eventually(lambda: scene.work.version == 2 and not scene.work.trouble, 40)

        play(act)

    def test_a_wake_ends_the_sleep(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)
            await scene.publish()
            assert scene.work.version == 3
            scene.work.wake()
            await eventually(lambda: scene.work.version == 4, 2)
            looks = Looks(scene)
            await asyncio.sleep(60)
            assert len(looks.times) <= 5

        play(act)

    def test_a_wake_during_a_look_is_not_lost(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)

            async def late(do: Act) -> Any:
                """Publishes and wakes the follower, too late for the current look."""
                try:
                    return await do()
                finally:
                    await scene.publish()
                    scene.work.wake()

            scene.bucket.trouble("get", commit_path(4), late)
            scene.work.wake()
            await eventually(lambda: scene.work.version == 4, 3)

        play(act)

    def test_a_flood_of_wakes_is_one_look_per_quarter_of_the_poll_interval(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)
            looks: list[float] = []

            async def note(do: Act) -> Any:
                looks.append(now())
                return await do()

            scene.bucket.trouble("get", commit_path(4), note, ALWAYS)
            for _ in range(1000):
                scene.work.wake()
                await asyncio.sleep(0.01)
            assert 5 < len(looks) <= 10 / (scene.bucket.poll_interval / 4) + 1
            assert min(later - earlier for earlier, later in pairwise(looks)) >= scene.bucket.poll_interval / 4

        play(act)

    def test_a_flood_of_wakes_leaves_a_wait_after_failures(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            looks = Looks(scene, failed)
            await asyncio.sleep(300)
            before = len(looks.times)
            for _ in range(6000):
                scene.work.wake()
                await asyncio.sleep(0.01)
            assert 8 <= len(looks.times) - before <= 60 / 5 + 1
            scene.bucket.calm()
            await scene.publish()
            scene.work.wake()
            await eventually(lambda: scene.work.version == 2, 6)

        play(act)
