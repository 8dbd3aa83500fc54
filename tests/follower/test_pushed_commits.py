"""Commits that are pushed to a follower: they save requests, and a stranger's change nothing."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from support.failing_bucket import Act, failed
from support.follow_scene import ALWAYS, Play, Scene, eventually, now
from weightwire.chain import PrivateKey, Signer
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import LARGEST_COMMIT, Commit, seal, unseal
from weightwire.follower import pushed_commits
from weightwire.follower.trust_settings import TrustSettings

KEY = PrivateKey.generate()


def next_commit(scene: Scene, **other: Any) -> bytes:
    """A valid commit after the newest, by a stranger who can read the bucket."""
    newest = scene.work.head
    data = scene.read(commit_path(newest))
    record = unseal(data, Commit, "").record
    fields = {
        "version": newest + 1,
        "parent": sha256(data).hexdigest(),
        "back": (record.parent, *record.back),
        "files": (),
    }
    fields |= {"before": record.after, "write_id": "5" * 32}
    return seal(msgspec.structs.replace(record, **fields | other)).data


async def caught_up(scene: Scene, versions: int = 3) -> None:
    await scene.publish(versions)
    await scene.work.look()
    scene.bucket.asked.clear()


class TestRequests:
    def test_a_pushed_version_takes_its_data_and_one_request(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish()
            scene.work.wake(scene.read(commit_path(4)))
            await scene.work.look()
            scene.check(4)
            assert scene.fetched() == ["deltas/4"]
            assert [one for one in scene.bucket.asked if one[0] != "read_into"] == [("get", commit_path(4))]

        play(act)

    def test_data_is_fetched_while_the_commit_is_confirmed(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish()

            async def slowly(do: Act) -> Any:
                await asyncio.sleep(10)
                return await do()

            scene.bucket.trouble("get", commit_path(4), slowly)
            scene.bucket.trouble("read_into", "deltas/4", slowly)
            scene.work.wake(scene.read(commit_path(4)))
            began = now()
            await scene.work.look()
            scene.check(4)
            assert now() - began < 12

        play(act)

    def test_several_pushed_versions_are_applied_in_order(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish(3)
            for version in (6, 4, 5):
                scene.work.wake(scene.read(commit_path(version)))
            await scene.work.look()
            scene.check(6)
            assert scene.bucket.count("get", "commits/") == 3

        play(act)

    def test_versions_whose_push_was_lost_are_found_in_the_bucket(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish(3)
            scene.work.wake(scene.read(commit_path(5)))
            await scene.work.look()
            scene.check(6)
            await scene.publish(2)
            scene.work.wake(scene.read(commit_path(7)))
            await scene.work.look()
            scene.check(7)
            await scene.work.look()
            scene.check(8)

        play(act)

    def test_a_push_to_a_follower_without_weights_only_wakes_it(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.work.wake(scene.read(commit_path(3)))
            await scene.work.look()
            scene.check(3)

        play(act)

    def test_running_follower_uses_a_push(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await scene.publish(3)
            scene.start()
            await asyncio.sleep(3000)
            await scene.publish()
            scene.work.wake(scene.read(commit_path(4)))
            await eventually(lambda: scene.work.version == 4, 2)

        play(act)


class TestStrangers:
    """A push that is not the next commit in the bucket changes nothing."""

    @pytest.mark.parametrize(
        "data",
        [b"", b"{}", b'{"version": 4}', b"\xff", b"[" * 100_000, b" " * (LARGEST_COMMIT + 1)],
        ids=["empty", "object", "version", "bytes", "nested", "large"],
    )
    def test_junk_only_wakes_it(self, play: Play, data: bytes) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish()
            scene.work.wake(data)
            await scene.work.look()
            scene.check(4)
            assert scene.warnings == []

        play(act)

    def test_a_commit_that_is_not_in_the_bucket_is_never_held(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            held = scene.work.commit
            scene.work.wake(next_commit(scene))
            await scene.work.look()
            assert scene.work.commit == held
            assert (scene.work.head, scene.work.trouble, scene.warnings) == (3, "", [])
            await scene.publish()
            await scene.work.look()
            scene.check(4)

        play(act)

    def test_another_commit_of_the_same_version_is_never_held(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            forged = next_commit(scene)
            await scene.publish()
            scene.work.wake(forged)
            await scene.work.look()
            scene.check(4)

        play(act)

    def test_files_of_an_unconfirmed_commit_are_not_lost(self, play: Play) -> None:
        """It names the data of the real version with another hash, so that its check fails."""

        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish()
            record = scene.commit(4)
            wrong = msgspec.structs.replace(record.files[0], sha256=record.files[0].sha256[:16] + "0" * 48)
            forged = seal(msgspec.structs.replace(record, files=(wrong,))).data
            real = scene.read(commit_path(4))
            scene.remove(commit_path(4))

            async def slowly(do: Act) -> Any:
                await asyncio.sleep(3)  # the data arrives first
                return await do()

            scene.bucket.trouble("get", commit_path(4), slowly)
            scene.work.wake(forged)
            await scene.work.look()
            assert scene.fetched() == ["deltas/4"]
            assert not scene.work._updater._fetcher.lost  # later paths would avoid it
            scene.write(commit_path(4), real)
            assert await scene.look() == ["deltas/4"]
            scene.check(4)
            assert scene.warnings == []

        play(act)

    def test_a_large_claim_is_not_fetched(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            file = msgspec.structs.replace(
                scene.commit(3).files[0], path=scene.commit(3).files[0].path.replace("/3/", "/4/"), size=1 << 40
            )
            scene.work.wake(next_commit(scene, files=(file,), kind="delta"))
            await scene.work.look()
            assert scene.fetched() == []

        play(act)

    def test_a_flood_is_bounded(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            back = tuple(f"{index}" * 64 for index in range(3))
            later = next_commit(scene, version=9, back=back)
            for _ in range(1000):
                scene.work.wake(later)
            pushed = scene.work._discovery.pushed
            assert len(pushed._given) <= pushed_commits._KEPT
            await scene.work.look()
            assert scene.work.version == 3

        play(act)

    def test_an_unsigned_push_to_a_follower_with_trusted_keys_is_not_fetched(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            scene.replica.close()
            scene.open(trust=TrustSettings(frozenset({KEY.public.hex})))
            await caught_up(scene)
            await scene.publish()
            first, _ = scene.read(commit_path(4)).split(b"\n", 1)
            scene.work.wake(first)
            await scene.work.look()
            scene.check(4)
            assert scene.bucket.count("get", commit_path(4)) == 1
            assert scene.bucket.count("get", commit_path(5)) > 0  # it was found by looking
            await scene.publish()
            scene.bucket.asked.clear()
            scene.work.wake(scene.read(commit_path(5)))
            await scene.work.look()
            scene.check(5)
            assert [one for one in scene.bucket.asked if one[0] != "read_into"] == [("get", commit_path(5))]

        play(act, signer=Signer(KEY))

    def test_a_bucket_that_fails_meanwhile_leaves_the_version(self, play: Play) -> None:
        async def act(scene: Scene) -> None:
            await caught_up(scene)
            await scene.publish()
            scene.start()
            scene.bucket.trouble("get", "commits/", failed, ALWAYS)
            scene.work.wake(scene.read(commit_path(4)))
            await asyncio.sleep(100)
            assert scene.work.version == 3
            assert scene.work.trouble
            scene.bucket.calm()
            await eventually(lambda: scene.work.version == 4, 100)

        play(act)
