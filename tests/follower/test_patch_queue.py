"""Patches that engines have not taken yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.follow_scene import (
    Arrays,
    Play,
    Scene,
)
from support.small_run import bits_of
from weightwire import digest, patch
from weightwire.follower import patch_queue
from weightwire.weights.source import read_weights


class TestPatches:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patch_queue, "_FEW", 0)  # keep nothing by default

    def test_patches_of_several_versions_are_merged(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            first = await scene.take()
            engine = {name: array.copy() for name, array in scene.weights.items()}
            assert digest(engine).hex == first.state
            await scene.publish(30)
            await scene.look()
            update = await scene.take()
            assert update.patch is not None
            assert (update.patch.before, update.patch.after) == (first.state, update.state)
            patch(engine, update.patch)
            assert digest(engine).hex == update.state
            assert bits_of(engine) == scene.bits[31]

        play(act)

    def test_waiting_patches_are_bounded_in_size(self, play: Play) -> None:
        """The same weights change repeatedly, so one patch covers all versions."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            engine = {name: array.copy() for name, array in scene.weights.items()}
            scene.every = 16
            most = sum(array.nbytes for array in engine.values()) // 4
            for _ in range(4):
                scene.steps = 0
                await scene.publish()
                await scene.look()
                assert 0 < scene.work._patches.nbytes <= most
            update = await scene.take()
            assert update.patch is not None
            patch(engine, update.patch)
            assert bits_of(engine) == scene.bits[5]

        play(act)

    def test_too_large_patches_are_dropped(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            scene.every = 8
            await scene.publish(6)
            await scene.look()
            assert (await scene.take()).patch is None
            engine = read_copy(await scene.work.checkpoint())
            scene.every = 997
            await scene.publish()
            await scene.look()
            update = await scene.take()
            assert update.patch is not None
            patch(engine, update.patch)
            assert bits_of(engine) == scene.bits[8]

        play(act)

    def test_patches_do_not_share_reused_buffers(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.take()
            engine = {name: array.copy() for name, array in scene.weights.items()}
            for version in range(2, 12):
                scene.every = 997 if version % 2 else 20
                await scene.publish()
                await scene.look()
                update = await scene.take()
                assert update.patch is not None
                patch(engine, update.patch)
                assert bits_of(engine) == scene.bits[version]

        play(act)


def read_copy(path: Path) -> Arrays:
    return {
        name: (tensor.dtype.name, tensor.shape, bytearray(tensor.bits.tobytes()))
        for name, tensor in read_weights(path).items()
    }
