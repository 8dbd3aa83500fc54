"""Sweeps that are killed, run concurrently, or run while versions are published and followed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from support.clocked_bucket import HOUR, Clocked, beat, clocked, first_weights, publish, run, stepped
from support.sweep_runs import SHORT, Lived, check_whole, commit_of, run_id, swept, swept_twice
from weightwire.bucket.bucket import GET_LIMIT
from weightwire.chain.keys import PrivateKey
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.record_paths import commit_path, gc_path
from weightwire.chain.records import FENCE, DataFile
from weightwire.chain.writer import Signer
from weightwire.delta.state import digest
from weightwire.errors import Unavailable
from weightwire.follower.follower import Follower
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import Sweep, sweep
from weightwire.upkeep.key_change import change_keys
from weightwire.upkeep.retention import Retention


class Flaky(Clocked):
    """Fails at the n-th write, as if the process was killed there."""

    left = 10**9

    def _note(self, verb: str, path: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unavailable("killed")
        super()._note(verb, path)


class TestConcurrency:
    def test_gc_can_be_killed_at_any_write(self) -> None:
        for killed_after in range(0, 40, 3):
            bucket = Flaky(clocked())
            publish(bucket, first_weights(), 7, every=HOUR, clock=bucket, anchor_every=2)
            for _ in range(2):
                bucket.now += 2 * HOUR
                bucket.left = killed_after
                with suppress(Unavailable):
                    swept(bucket)
                bucket.left = 10**9
                check_whole(bucket)
            swept_twice(bucket)
            check_whole(bucket)
            assert bucket.versions("deltas") == [5, 6, 7]
            assert bucket.versions("anchors") == [5, 7]

    def test_concurrent_sweeps_delete_the_same_data_as_one(self, bucket: Clocked) -> None:
        async def all_at_once() -> list[Sweep]:
            return await asyncio.gather(*(sweep(bucket, Runtime(), SHORT) for _ in range(4)))

        run(all_at_once())
        bucket.now += HOUR
        run(all_at_once())

        assert bucket.versions("deltas") == [7, 8, 9, 10]
        assert bucket.paths("gc/") == [gc_path(7)]
        check_whole(bucket)

    @pytest.mark.parametrize("moment", ["shortcuts/", "anchors/"])
    def test_anchors_of_a_key_that_is_revoked_during_a_sweep_justify_no_deletion(self, moment: str) -> None:
        """The shortcuts of versions 3 to 7 no longer count. The first version's own commit still does."""
        old, new = PrivateKey.generate(), PrivateKey.generate()
        bucket = clocked()
        publish(bucket, first_weights(), 7, every=HOUR, clock=bucket, anchor_every=2, key=old)
        bucket.now += 2 * HOUR
        swept(bucket)
        bucket.now += HOUR
        get, read_into, moments = bucket.get, bucket.read_into, [moment]

        async def revoke_after(path: str) -> None:
            if moments and path.startswith(moments[0]):
                moments.clear()
                added, revoked = frozenset({new.public.hex}), frozenset({old.public.hex})
                await change_keys(bucket, Runtime(), Signer(old, frozenset()), added, revoked, lambda message: None)

        async def get_and_revoke(path: str, limit: int = GET_LIMIT) -> bytes:
            data = await get(path, limit)
            await revoke_after(path)
            return data

        async def read_and_revoke(path: str, buffer: memoryview, start: int = 0) -> None:
            await read_into(path, buffer, start)
            await revoke_after(path)

        bucket.get, bucket.read_into = get_and_revoke, read_and_revoke  # type: ignore[method-assign]
        assert swept(bucket).below <= 1
        assert not moments
        assert bucket.versions("deltas") == [2, 3, 4, 5, 6, 7]
        check_whole(bucket)

    def test_versions_published_during_a_sweep_survive(self, lived: Lived) -> None:
        """Between the steps of a sweep, new publishers take over and publish two versions with anchors."""
        bucket = lived.bucket
        swept(bucket)
        bucket.now += HOUR
        moments = {("list", "deltas/"), ("list", "shortcuts/"), ("get", gc_path(7)), ("get", commit_path(10))}
        weights = lived.weights

        async def publish_first(verb: str, path: str) -> None:
            nonlocal weights
            if (verb, path) in moments:
                moments.remove((verb, path))
                bucket.hook = None  # the publisher reads as well
                weights = await asyncio.to_thread(publish, bucket, stepped(weights, 5), 2, anchor_every=1)
                bucket.hook = publish_first

        bucket.hook = publish_first
        found = swept(bucket)

        assert not moments
        assert found.head == 10 < max(bucket.versions("deltas"))
        assert bucket.versions("deltas")[:2] == [7, 8]
        check_whole(bucket)

    def test_listing_that_misses_a_commit_does_not_change_the_limit(self, bucket: Clocked) -> None:
        """The listing of a directory may miss an object if others are written meanwhile."""
        bucket.hidden.add(commit_path(9))
        assert swept(bucket).below == 7

    def test_clock_of_this_machine_is_not_used(self, bucket: Clocked) -> None:
        class Wrong(Runtime):
            def time(self) -> float:
                return 1e12

        run(sweep(bucket, Wrong(), SHORT))
        bucket.now += HOUR - 1
        assert run(sweep(bucket, Wrong(), SHORT)).removed == ()

    def test_live_replica_finds_all_later_data(self, bucket: Clocked) -> None:
        bucket.write(*beat(run_id(bucket), "slow", 3, lease=10 * HOUR))
        swept_twice(bucket)

        chain = ChainReader(bucket, run(read_run(bucket)))
        files: list[DataFile] = []
        for version in range(4, 11):
            commit = run(chain.read(version))
            assert commit is not None
            assert commit.record.kind != FENCE
            files += commit.record.files
        assert {file.path for file in files} <= set(bucket.paths())


class TestFollowers:
    """Real followers with replicas."""

    def follow(self, bucket: Clocked, into: Path) -> tuple[int, str]:
        """Catches up. Returns the version and the state of the checkpoint."""
        with Follower(bucket, into=into, name="a", threads=1, on_event=lambda event: None) as follower:
            return follower.once(), digest(follower.checkpoint()).hex

    def test_late_follower_starts_from_an_anchor(self, tmp_path: Path) -> None:
        bucket = clocked()
        weights = publish(bucket, first_weights(), 3, every=HOUR, clock=bucket, anchor_every=3)
        assert self.follow(bucket, tmp_path)[0] == 3
        publish(bucket, stepped(weights, 7), 9, every=HOUR, clock=bucket, anchor_every=3)

        swept_twice(bucket)

        assert bucket.versions("deltas")[0] > 4
        assert self.follow(bucket, tmp_path) == (13, commit_of(bucket, 13).after)

    def test_live_follower_continues_with_deltas(self, tmp_path: Path) -> None:
        bucket = clocked()
        weights = publish(bucket, first_weights(), 3, anchor_every=3)
        with Follower(bucket, into=tmp_path, name="a", threads=1, on_event=lambda event: None) as follower:
            follower.once()
            publish(bucket, stepped(weights, 7), 9, anchor_every=3)
            bucket.now += 30  # of a lease of 60

            swept(bucket, Retention(1, 0.0, 0.0))

            assert bucket.versions("deltas")[0] == 5  # version 4 is a fence
        assert self.follow(bucket, tmp_path) == (13, commit_of(bucket, 13).after)

    def test_stopped_follower_keeps_no_data(self, tmp_path: Path) -> None:
        bucket = clocked()
        weights = publish(bucket, first_weights(), 3, anchor_every=3)
        self.follow(bucket, tmp_path)
        publish(bucket, stepped(weights, 7), 9, anchor_every=3)

        swept(bucket, Retention(1, 0.0, 0.0))

        assert bucket.versions("deltas")[0] == 11
        assert self.follow(bucket, tmp_path) == (13, commit_of(bucket, 13).after)
