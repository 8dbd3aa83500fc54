"""Ranks train at different speeds, but publish the same step."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from support.captures import eventually
from support.failing_bucket import Act, Troubled
from support.rank_circle import SIZES, at_step, check_no_mixture, on_all, shard, steps
from weightwire.errors import CheckpointError, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.ranks import rank_process, setup, turns
from weightwire.telemetry.events import Event


class TestTiming:
    @pytest.mark.parametrize("slow_rank", [0, 1, 2])
    def test_every_version_is_of_the_same_step_on_every_rank(self, bucket: Troubled, slow_rank: int) -> None:
        halfway: list[int] = []

        async def slowly(act: Act) -> Any:
            while len(halfway) < 3:  # so that some steps are superseded, however slow the ranks are
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)
            return await act()

        bucket.trouble("put", "deltas/", slowly, times=1e9)

        def work(publisher: Publisher, rank: int) -> list[Publication]:
            published = []
            for step in range(40):
                if rank == slow_rank:
                    time.sleep(0.003)
                published.append(publisher.publish(shard(at_step(step), rank, 3), step=step))
                if step == 20:
                    halfway.append(rank)
            return published

        ranks = on_all(bucket, 3, work)
        check_no_mixture(bucket)
        assert steps(bucket)[-1] == 39
        assert len(steps(bucket)) < 40
        for publications in ranks:
            assert all(one.done for one in publications)
            assert [one.wait(0) for one in publications] == sorted(one.wait(0) for one in publications)
        assert len({tuple(one.version for one in publications) for publications in ranks}) == 1

    def test_ranks_wait_for_one_that_is_far_behind(self, bucket: Troubled) -> None:
        """The others continue up to one capture beyond the agreed one."""
        go = threading.Event()

        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            if rank == 1:
                go.wait(60)
            publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
            if rank == 0:
                time.sleep(0.2)
                assert not publication.done
                go.set()
            return publication.wait(60)

        assert on_all(bucket, 2, work) == [2, 2]

    def test_a_late_rank_warns(self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(turns, "LATE", 0.05)
        heard: list[Event] = []

        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            if rank == 1:
                said = "rank 1 has not published a step that others have published"
                assert eventually(lambda: any(said in event.message for event in heard))
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)

        assert on_all(bucket, 2, work, on_event=heard.append) == [2, 2]

    def test_a_rank_that_waits_for_the_first_publish_of_others_warns(
        self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(setup, "LATE", 0.05)
        heard: list[Event] = []

        def work(publisher: Publisher, rank: int) -> int:
            if rank == 1:
                said = "rank 0 waits for the first publish of the other ranks"
                assert eventually(lambda: any(said in event.message for event in heard))
            return publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)

        assert on_all(bucket, 2, work, on_event=heard.append) == [1, 1]

    def test_a_rank_that_waits_for_a_passed_publish_fails(
        self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its weights can no longer be published, and it would wait forever."""
        monkeypatch.setattr(turns, "LATE", 0.1)
        monkeypatch.setattr(rank_process, "PULSE", 600.0)  # rank 0 looks at the others only when it publishes
        go = threading.Event()

        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
            if rank == 0:
                go.wait(60)
            publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
            if rank == 1:
                publication = publisher.publish(shard(at_step(2), rank, 2), step=2)
                go.set()
            with pytest.raises(WeightwireError, match=r"^rank 0 waits for publish 2, but others are at publish 3"):
                publication.wait(60)
            if rank == 0:
                publisher.publish(shard(at_step(2), rank, 2), step=2)
            publisher.publish(shard(at_step(3), rank, 2), step=3).wait(60)

        on_all(bucket, 2, work)
        assert steps(bucket)[-1] == 3
        check_no_mixture(bucket)

    @SIZES
    def test_blocking_publishers_publish_the_same_versions(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> list[int | None]:
            return [publisher.publish(shard(at_step(step), rank, size), step=step).version for step in range(4)]

        assert on_all(bucket, size, work, blocking=True) == [[1, 2, 3, 4]] * size
        check_no_mixture(bucket)

    @pytest.mark.parametrize("blocking", [False, True])
    def test_a_publish_in_which_no_rank_has_tensors_is_refused_on_every_rank(
        self, bucket: Troubled, blocking: bool
    ) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            with pytest.raises(CheckpointError, match="no rank has tensors to publish") as caught:
                publisher.publish({}).wait(60)
            assert caught.value.hint

        on_all(bucket, 2, work, blocking=blocking)

    def test_pending_weights_are_published_when_all_close(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            for step in range(10):
                publisher.publish(shard(at_step(step), rank, 2), step=step)

        on_all(bucket, 2, work)
        assert steps(bucket)[-1] == 9
        check_no_mixture(bucket)

    def test_ranks_that_publish_nothing_leave_an_empty_bucket(self, bucket: Troubled) -> None:
        on_all(bucket, 2, lambda publisher, rank: None)
        assert asyncio.run(bucket.list("")) == []
