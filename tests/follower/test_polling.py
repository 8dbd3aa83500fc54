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
from weightwire.chain.records import (
    commit_path,
)


class Looks:
    """When the bucket was asked for the next commit."""

    def __init__(self, scene: Scene, what: Trouble | None = None) -> None:
        self.times: list[float] = []

        async def note(do: Act) -> Any:
            if not self.times or now() - self.times[-1] > 0.14:  # else it makes sure of the commit that it has
                self.times.append(now())
            return await (what(do) if what else do())

        scene.bucket.trouble("get", "commits/", note, ALWAYS)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class TestPolling:
    """The seconds between two looks are from three quarters to five quarters of what they should be."""

    def test_is_quick_where_nothing_is_known_yet(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            looks = Looks(scene)
            await asyncio.sleep(5)
            assert len(looks.gaps()) > 15
            assert min(looks.gaps()) >= 0.15
            assert max(looks.gaps()) <= 0.25 + 0.3  # and the request

        play(act)

    def test_is_a_fifth_of_the_time_between_versions(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.start()
            publishing = asyncio.create_task(scene.publish(12, pause=20))
            await eventually(lambda: scene.work.version == 5)
            looks = Looks(scene)
            await eventually(lambda: scene.work.version == 9)
            apart = [gap for gap in looks.gaps() if gap > 1]  # others are of the same look
            assert len(apart) >= 12
            assert 3 - 0.1 <= min(apart) <= max(apart) <= 5 + 1.5
            await publishing

        play(act)

    def test_gets_rarer_where_nothing_comes(self, play: Play) -> None:
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
            assert max(recent) - min(recent) > 5  # no two followers in step

        play(act)

    def test_is_quick_again_when_versions_come(self, play: Play) -> None:
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

    def test_is_gentle_where_requests_are_rationed(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.bucket.poll_interval = 2.0
            await scene.publish()
            scene.start()
            await eventually(lambda: scene.work.version == 1)
            looks = Looks(scene)
            await asyncio.sleep(20)
            assert len(looks.gaps()) > 5
            assert min(looks.gaps()) >= 1.5

        play(act)

    def test_gets_rarer_where_it_fails(self, play: Play) -> None:
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

    def test_is_cut_short_by_a_wake(self, play: Play) -> None:
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

    def test_a_wake_while_it_looks_is_not_lost(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)

            async def late(do: Act) -> Any:
                """Someone publishes, and says so, when it is too late for this look to see it."""
                try:
                    return await do()
                finally:
                    await scene.publish()
                    scene.work.wake()

            scene.bucket.trouble("get", commit_path(4), late)
            scene.work.wake()
            await eventually(lambda: scene.work.version == 4, 3)

        play(act)
