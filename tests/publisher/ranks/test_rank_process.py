"""A failure on one rank fails all, and no version mixes two steps."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from support.failing_bucket import Act, Troubled, denied
from support.rank_circle import RankCircle, at_once, at_step, check_no_mixture, on_all, shard, steps
from support.run_contents import commits_in
from weightwire.errors import (
    BucketError,
    CheckpointError,
    Fenced,
    NoRun,
    PermissionDenied,
    RankFailed,
    SchemaChanged,
    Unavailable,
    WeightwireError,
)
from weightwire.inspection.verify import verify_run
from weightwire.publisher.publisher import Publisher
from weightwire.system.runtime import Runtime


class TestFailures:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_failure_on_one_rank_fails_all(self, bucket: Troubled, rank: int) -> None:
        bucket.trouble("put", f"deltas/2/e1-r{rank}", denied)

        def work(publisher: Publisher, rank: int) -> list[Any]:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            failed = publisher.publish(shard(at_step(1), rank, 2), step=1)
            with pytest.raises(PermissionDenied):
                failed.wait(60)
            return [publisher.publish(shard(at_step(2), rank, 2), step=2).wait(60)]

        assert on_all(bucket, 2, work) == [[2], [2]]
        assert steps(bucket) == [0, 2]
        check_no_mixture(bucket)

    def test_a_first_version_that_fails_is_followed_by_the_next(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/1/e1-r1", denied)

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(PermissionDenied):
                publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)

        assert on_all(bucket, 2, work) == [1, 1]
        check_no_mixture(bucket)

    @pytest.mark.parametrize("blocking", [False, True])
    def test_a_publish_of_other_weights_on_one_rank_fails_on_all(self, bucket: Troubled, blocking: bool) -> None:
        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            weights = shard(at_step(1), rank, 2)
            if rank == 1:
                weights["layer.weight"] = np.zeros(3)
            with pytest.raises(WeightwireError):
                publisher.publish(weights, step=1).wait(60)
            return publisher.publish(shard(at_step(2), rank, 2), step=2).wait(60)

        assert on_all(bucket, 2, work, blocking=blocking) == [2, 2]
        assert steps(bucket) == [0, 2]
        check_no_mixture(bucket)

    def test_weights_that_cannot_be_read_on_one_rank_fail_on_all(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            with pytest.raises(WeightwireError):
                publisher.publish({"x": "y"} if rank else shard(at_step(1), rank, 2), step=1).wait(60)
            return publisher.publish(shard(at_step(2), rank, 2), step=2).wait(60)

        assert on_all(bucket, 2, work) == [2, 2]
        assert steps(bucket) == [0, 2]

    def test_a_first_publish_that_fails_on_one_rank_fails_on_all(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(WeightwireError):
                publisher.publish({"x": "y"} if rank else shard(at_step(0), rank, 2), step=0).wait(60)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)

        assert on_all(bucket, 2, work) == [1, 1]
        assert steps(bucket) == [1]

    def test_shards_that_leave_rows_out_are_refused(self, bucket: Troubled) -> None:
        """All ranks get the error and may publish again."""

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(CheckpointError, match="no rank holds rows"):
                publisher.publish(shard(at_step(0), rank, 3), step=0)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)

        assert on_all(bucket, 2, work) == [1, 1]
        assert steps(bucket) == [1]

    def test_ranks_at_different_steps_publish_nothing(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publication = publisher.publish(shard(at_step(rank), rank, 2), step=rank)
            with pytest.raises(WeightwireError, match="different steps"):
                publication.wait(60)

        on_all(bucket, 2, work)
        assert asyncio.run(bucket.list("commits/")) == []

    def test_a_run_that_cannot_be_started_is_started_by_the_next_publish(self, bucket: Troubled) -> None:
        bucket.trouble("create", "run.json", denied, times=1)

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(PermissionDenied):
                publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)

        assert on_all(bucket, 2, work) == [1, 1]

    def test_an_unusable_bucket_fails_all_ranks(self, bucket: Troubled) -> None:
        bucket.trouble("create", "probe/", denied, times=1e9)
        circle = RankCircle(2)

        def one(rank: int) -> str:
            with pytest.raises(BucketError) as caught:
                Publisher(bucket, ranks=circle.seat(rank))
            return caught.value.message

        mine, theirs = at_once(2, one)
        assert theirs == f"rank 0: {mine}"

    def test_a_fence_fails_all_ranks(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            if rank == 0:
                with Publisher(bucket) as other:
                    assert other.publish(at_step(5), step=5).wait(60) == 3
            publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
            with pytest.raises(Fenced):
                publication.wait(60)
            with pytest.raises(Fenced):
                publisher.publish(shard(at_step(2), rank, 2), step=2)

        on_all(bucket, 2, work)
        assert steps(bucket) == [0, 5]

    @pytest.mark.parametrize("moment", ["before", "between", "during"])
    @pytest.mark.parametrize("gone", [0, 1])
    def test_all_ranks_end_when_one_is_gone(self, bucket: Troubled, moment: str, gone: int) -> None:
        """No rank waits forever, and nothing partial is committed."""
        circle = RankCircle(3)
        last = 1 if moment == "before" else 2

        def one(rank: int) -> None:
            seat = circle.seat(rank)
            publisher = Publisher(bucket, ranks=seat, threads=1)
            if moment != "before":
                publisher.publish(shard(at_step(0), rank, 3), step=0).wait(60)
            if rank == gone:
                if moment == "during":

                    async def die(act: Act) -> Any:
                        circle.leave(gone)
                        return await act()

                    bucket.trouble("put", f"deltas/2/e1-r{gone}", die)
                else:
                    seat.close()
            with pytest.raises(RankFailed):
                publisher.publish(shard(at_step(1), rank, 3), step=1).wait(60)
            with pytest.raises(RankFailed):
                publisher.publish(shard(at_step(2), rank, 3), step=2)
            publisher.close(60)

        at_once(3, one)
        if last == 2:
            assert steps(bucket) == [0]
            check_no_mixture(bucket)

    def test_a_rank_that_closes_too_early_is_named(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            if rank == 0:
                publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
                with pytest.raises(
                    WeightwireError, match=r"^rank 1 closed its publisher after publish 1, but others are at publish 2"
                ):
                    publication.wait(60)

        on_all(bucket, 2, work)
        assert steps(bucket) == [0]

    def test_a_rank_fails_after_rank_0_has_closed(self, bucket: Troubled) -> None:
        ended = threading.Event()

        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            if rank == 1:
                ended.wait(60)
                time.sleep(0.1)
                with pytest.raises(WeightwireError, match="rank 0 closed"):
                    publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)
            else:
                threading.Timer(0.1, ended.set).start()

        on_all(bucket, 2, work)
        assert steps(bucket) == [0]

    def test_ranks_with_other_tensors_do_not_fence_off_the_live_publisher(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish({"x": np.zeros(3, np.float32)}).wait(60)

        def work(publisher: Publisher, rank: int) -> None:
            for _ in range(2):
                with pytest.raises(SchemaChanged):
                    publisher.publish(shard(at_step(0), rank, 2), step=0)

        on_all(bucket, 2, work)
        assert [commit.kind for commit in commits_in(bucket)] == ["fence", "anchor"]  # no publisher was fenced off

    def test_a_first_version_is_given_up_if_another_publisher_started_the_run(self, bucket: Troubled) -> None:
        """The next version is an anchor in the other publisher's run."""
        gate = threading.Event()

        async def overtaken(act: Act) -> Any:
            await act()
            with Publisher(Troubled(bucket.inner)) as other:
                other.publish(at_step(7), step=7).wait(60)
            gate.set()

        bucket.trouble("put", "anchors/1/e1-r0", overtaken)

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(WeightwireError, match="another publisher started the run"):
                publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)

        assert on_all(bucket, 2, work) == [3, 3]
        assert gate.is_set()
        assert steps(bucket) == [7, 1]
        check_no_mixture(bucket)


class TestRandomFailures:
    """Slow and lost ranks, failed requests, lost replies, and restarts with other numbers of ranks."""

    @pytest.mark.parametrize(
        "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]
    )
    def test_no_version_mixes_two_steps(self, bucket: Troubled, seed: int) -> None:
        chance = random.Random(seed)
        first = 0
        for _ in range(3):
            self.live(bucket, chance, first)
            first += 12
        bucket.calm()
        with contextlib.suppress(NoRun):
            check_no_mixture(bucket)
            assert asyncio.run(verify_run(bucket, Runtime(), rebuild=True)).fine

    def live(self, bucket: Troubled, chance: random.Random, first: int) -> None:
        """Runs one job to its end, which may come early."""
        size = chance.choice([2, 3])
        circle = RankCircle(size)
        leaves = {chance.randrange(size): chance.randrange(12)} if chance.random() < 0.4 else {}
        seeds = [chance.random() for _ in range(size)]
        how: dict[str, Any] = {"blocking": chance.random() < 0.3, "anchor_every": 3}

        async def unlucky(act: Act) -> Any:
            await asyncio.sleep(chance.choice([0, 0, 0, 0.01]))
            if chance.random() < 0.02:
                raise Unavailable("the request failed")
            result = await act()
            if chance.random() < 0.02:
                raise Unavailable("the reply was lost")
            return result

        def one(rank: int) -> list[int | None]:
            mine = random.Random(seeds[rank])
            published = []
            with contextlib.suppress(WeightwireError):
                publisher = Publisher(bucket, ranks=circle.seat(rank), threads=1, **how)
                try:
                    for step in range(first, first + 12):
                        time.sleep(mine.choice([0, 0.002, 0.02]))
                        if leaves.get(rank) == step - first:
                            circle.leave(rank)
                        published.append(publisher.publish(shard(at_step(step), rank, size), step=step))
                finally:
                    publisher.close(120)
            return [one.version for one in published if one.done]

        bucket.calm()
        bucket.trouble("create put get list find read_into", "", unlucky, times=1e9)
        versions = at_once(size, one)
        if not leaves:
            assert all(each == versions[0] for each in versions)
