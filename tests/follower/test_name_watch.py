"""Another running follower with the same name is noticed by its heartbeats."""

from __future__ import annotations

import asyncio

from support.failing_bucket import slow
from support.follow_scene import NAME, Play, Scene, eventually
from support.followers import ALWAYS
from weightwire.chain.record_paths import heartbeat_path
from weightwire.chain.records import Heartbeat, seal
from weightwire.follower.follow_loop import FollowLoop


async def started(scene: Scene, *, rename: bool) -> list[str]:
    """Follows, and returns the list of new names."""
    names: list[str] = []

    def other_name() -> str:
        names.append(f"new-{len(names)}")
        return names[-1]

    await scene.publish()
    scene.work = FollowLoop(scene.work._context, NAME, other_name if rename else None)
    scene.start()
    await eventually(lambda: scene.work.version == 1)
    await asyncio.sleep(40)
    return names


def beat_of_another(scene: Scene) -> bytes:
    return seal(Heartbeat(run=scene.beat.run, name=NAME, version=0, head=1, lease=60.0)).data


class TestNameWatch:
    def test_follower_takes_another_name(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            names = await started(scene, rename=True)
            scene.write(heartbeat_path(NAME), other := beat_of_another(scene))
            await asyncio.sleep(40)
            assert names == ["new-0"]
            assert scene.store.objects[heartbeat_path(NAME)][0] == other
            assert heartbeat_path("new-0") in scene.store.objects
            assert scene.warnings == [f"another running follower uses the name {NAME}, so this one is now new-0"]
            await asyncio.sleep(600)
            assert len(names) == 1

        play(act)

    def test_follower_with_a_given_name_warns_once(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await started(scene, rename=False)
            for _ in range(3):
                scene.write(heartbeat_path(NAME), beat_of_another(scene))
                await asyncio.sleep(40)
            assert scene.warnings == [f"another running follower uses the name {NAME}: give each its own --name"]
            assert scene.beat.version == 1

        play(act)

    def test_own_heartbeats_are_recognized(self, play: Play) -> None:
        """Also after a restart, when the bucket holds one of the process before, and when replies are late."""

        async def act(scene: Scene) -> None:
            names = await started(scene, rename=True)
            await scene.stop()
            scene.replica.close()
            scene.open()
            names += await started(scene, rename=True)
            scene.bucket.trouble("put", "replicas/", slow(7), ALWAYS)
            for _ in range(10):
                await scene.publish()
                await asyncio.sleep(20)
            assert names == []
            assert not [message for message in scene.warnings if "name" in message]

        play(act)
