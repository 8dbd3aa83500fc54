"""The path to the newest version, and the number of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from support.failing_bucket import Act
from support.follow_scene import (
    ALWAYS,
    Play,
    Scene,
    now,
    random_bits,
)
from support.records import sha
from weightwire.chain.record_paths import HEAD, RUN, commit_path
from weightwire.chain.records import HeadHint, Run, Shortcut, seal, shortcut_path, unseal
from weightwire.errors import BrokenChain, DataGone


class TestRequests:
    def test_a_look_without_new_versions_takes_one_request(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            for _ in range(3):
                assert await scene.look() == []
                assert scene.bucket.asked == [("get", commit_path(4))]

        play(act)

    def test_a_new_version_takes_few_requests(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            await scene.look()
            await scene.publish()
            assert await scene.look() == ["deltas/4"]
            assert scene.bucket.asked.count(("get", commit_path(4))) == 1
            assert len(scene.bucket.asked) <= 4
            scene.check(4)

        play(act)

    def test_some_versions_are_read_one_by_one(self, play: Play) -> None:
        """The anchors are not listed."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(60)
            assert await scene.look() == [f"deltas/{version}" for version in range(2, 62)]
            assert scene.bucket.count("list") == scene.bucket.count("find") == scene.bucket.count("get", HEAD) == 0
            assert scene.bucket.count("get", "commits/") <= 60 + 6
            scene.check(61)

        play(act)

    def test_many_versions_are_planned(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(66)
            assert await scene.look() == [f"deltas/{version}" for version in range(2, 68)]
            assert scene.bucket.count("list", "shortcuts/") == 1
            scene.check(67)

        play(act)

    def test_an_anchor_is_used_if_it_is_cheaper(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            assert await scene.look() == ["anchors/81", *(f"deltas/{version}" for version in range(82, 92))]
            scene.check(91)

        play(act, anchor_every=20)

    def test_deltas_are_used_if_they_are_cheaper(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(70)
            assert await scene.look() == [f"deltas/{version}" for version in range(2, 72)]

        play(act, anchor_every=20)

    def test_a_delta_as_large_as_an_anchor_is_planned(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            for seed in range(2, 6):
                scene.weights["embed"][:] = random_bits(seed)
                await scene.publish()
            assert await scene.look() == ["anchors/5"]
            scene.check(5)

        play(act, anchor_every=4)

    def test_a_long_history_is_proven_with_few_requests(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(200)
            assert await scene.look() == ["anchors/181", *(f"deltas/{version}" for version in range(182, 201))]
            scene.check(200)
            assert scene.bucket.count("get", "commits/") < 60

        play(act, anchor_every=20)

    def test_the_newest_version_is_found_without_head_json(self, play: Play) -> None:
        """HEAD.json is missing, malformed or wrong: the newest version is still found."""

        async def act(scene: Scene) -> None:
            await scene.publish(20)
            run = scene.run_id
            hints = [None, b"hello", seal(HeadHint(run=run, version=3)).data, seal(HeadHint(run=run, version=900)).data]
            for k, hint in enumerate(hints):
                scene.remove(HEAD)
                if hint is not None:
                    scene.write(HEAD, hint)
                scene.replica.close()
                scene.into = scene.into.with_name(f"replica-{k}")
                scene.open()
                await scene.look()
                scene.check(20)

        play(act)

    def test_a_restarted_follower_fetches_nothing_again(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(4)
            await scene.look()
            scene.replica.close()
            scene.open()
            assert await scene.look() == []
            assert scene.bucket.asked == [("get", RUN), ("get", commit_path(4)), ("get", commit_path(5))]
            scene.check(4)

        play(act)

    def test_versions_are_fetched_ahead(self, play: Play) -> None:
        """The next versions are fetched while one is applied."""

        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(8)
            together, most = 0, 0

            async def slowly(do: Act) -> Any:
                nonlocal together, most
                together += 1
                most = max(most, together)
                await asyncio.sleep(10)
                together -= 1
                return await do()

            scene.bucket.trouble("read_into", "", slowly, ALWAYS)
            began = now()
            await scene.look()
            assert most == 4
            assert now() - began < 40
            scene.check(9)

        play(act)


class TestAnchors:
    def test_forged_anchors_are_not_used(self, play: Play) -> None:
        """Anyone with write permission may have written them."""

        async def act(scene: Scene) -> None:
            await scene.publish(8)
            [path] = [path for path in scene.store.objects if path.startswith("shortcuts/5/")]
            good = unseal(scene.read(path), Shortcut, "").record
            scene.remove("shortcuts/")
            lie = Shortcut(run=good.run, version=5, kind="anchor", after=sha("lie"), files=good.files)
            scene.write(shortcut_path(seal(lie)), seal(lie).data)
            scene.write("shortcuts/6/anchor-0123456789abcdef.json", b"hello")
            scene.write("shortcuts/7/anchor-0123456789abcdef.json", seal(good).data)
            assert (await scene.look())[0] == "anchors/1"
            scene.check(8)

        play(act, anchor_every=4)

    def test_anchors_with_missing_data_are_skipped(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(10)
            scene.remove("anchors/9/")
            assert await scene.look() == ["anchors/9", "anchors/5", *(f"deltas/{v}" for v in range(6, 11))]
            scene.check(10)

        play(act, anchor_every=4)

    def test_anchors_lead_past_data_deleted_by_gc(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(9)
            for version in range(1, 9):
                for folder in ("deltas", "anchors", "shortcuts"):
                    scene.remove(f"{folder}/{version}/")
            assert (await scene.look())[-2:] == ["anchors/9", "deltas/10"]
            scene.check(10)
            assert (await scene.take()).patch is None

        play(act, anchor_every=4)

    def test_damaged_anchors_are_skipped(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish()
            await scene.look()
            await scene.publish(90)
            [path] = [path for path in scene.store.objects if path.startswith("anchors/81/")]
            scene.write(path, bytes(len(scene.read(path))))
            fetched = await scene.look()
            assert fetched[:2] == ["anchors/81", "anchors/61"]
            scene.check(91)
            assert scene.replica.trouble is None

        play(act, anchor_every=20)

    def test_anchors_of_another_history_are_refused(self, play: Play) -> None:
        """Some commits follow from the version held, but later ones with an anchor do not follow from those."""

        async def act(scene: Scene) -> None:
            scene.every = 50
            await scene.publish(3)
            await scene.look()
            other = Scene(scene.into.with_name("other"), seed=8, anchor_every=20)
            other.replica.close()
            other.store.objects.update(scene.store.objects)
            other.every = 50
            await other.publish(90)
            await scene.publish(66)
            for path, one in other.store.objects.items():
                if not path.startswith("commits/") or path > commit_path(68):
                    scene.store.objects[path] = one
            with pytest.raises(BrokenChain, match="its hash is not the one that later commits name"):
                await scene.look()
            scene.check(3)

        play(act)


class TestLostData:
    def test_lost_data_is_tried_again_at_the_next_look(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(2)
            objects = dict(scene.store.objects)
            scene.remove("deltas/2/")
            for _ in range(2):
                with pytest.raises(DataGone, match="no anchor leads"):
                    await scene.look()
                scene.check(1)
            scene.store.objects = objects
            await scene.look()
            scene.check(3)

        play(act)

    def test_damaged_data_is_avoided_with_an_anchor(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish()
            await scene.look()
            await scene.publish(6)
            [path] = [path for path in scene.store.objects if path.startswith("deltas/3/")]
            scene.write(path, bytes(len(scene.read(path))))
            await scene.look()
            scene.check(7)

        play(act, anchor_every=4)


def test_new_follower_reads_a_damaged_run_json_again(play: Play) -> None:
    """It holds nothing that could contradict run.json, so only the first commit shows the damage."""

    async def act(scene: Scene) -> None:
        await scene.publish(2)
        whole = scene.read(RUN)
        run = unseal(whole, Run, RUN).record
        damaged = msgspec.structs.replace(run, tensors={**run.tensors, "norm": ("F32", (6,))})
        scene.write(RUN, seal(damaged).data)
        for _ in range(2):
            with pytest.raises(BrokenChain, match=r"does not belong to this run\.json"):
                await scene.look()
        scene.write(RUN, whole)
        await scene.look()
        scene.check(2)

    play(act)
