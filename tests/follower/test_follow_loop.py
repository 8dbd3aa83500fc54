"""The order in which a follower tells of versions and hands them out."""

from __future__ import annotations

import asyncio

import pytest

from support.follow_scene import (
    Play,
    Scene,
)


class TestEvents:
    @pytest.mark.parametrize("way", ["rebuilt", "patched"])
    def test_a_version_is_told_of_before_it_can_be_taken(self, play: Play, way: str) -> None:
        """So that whoever takes it knows how many bytes it took."""

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
