"""Several ranks publish one model: each its own rows, and all of them the same step or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from support.published import commits_in, run_in, version_in
from support.troubled import Act, Troubled, denied, in_memory
from weightwire import Follower, digest
from weightwire.bucket.registry import open_bucket
from weightwire.chain.records import Shortcut, unseal
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
from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.ranks import setup, turns
from weightwire.publisher.ranks.partition import holdings_of, partition_rows
from weightwire.publisher.ranks.protocol import Meeting
from weightwire.system.runtime import Runtime
from weightwire.telemetry.events import Event
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Tensor

Arrays = dict[str, Any]
Result = TypeVar("Result")
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


# --- ranks in threads ------------------------------------------------------------------------------------------------


class Circle:
    """Ranks in one process, each with a loop of its own. Whoever leaves breaks it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gathered = 0
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._here: dict[int, tuple[bytes, asyncio.AbstractEventLoop, asyncio.Future[list[bytes]]]] = {}

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def join(self, rank: int, data: bytes) -> asyncio.Future[list[bytes]]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._left:
                raise self._gone()
            future: asyncio.Future[list[bytes]] = loop.create_future()
            self._here[rank] = data, loop, future
            if len(self._here) == self.size:
                everyone = [self._here[each][0] for each in range(self.size)]
                self._end(lambda one: one.set_result(everyone))
                self.gathered += 1
            return future

    def leave(self, rank: int) -> None:
        with self._lock:
            self._left.add(rank)
            self._end(lambda one: one.set_exception(self._gone()))

    def _end(self, end: Callable[[asyncio.Future[list[bytes]]], None]) -> None:
        for _, loop, future in self._here.values():
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._tell, future, end)
        self._here.clear()

    def _tell(self, future: asyncio.Future[list[bytes]], end: Callable[[asyncio.Future[list[bytes]]], None]) -> None:
        if not future.done():
            end(future)

    def _gone(self) -> RankFailed:
        return RankFailed(f"rank {min(self._left)} is gone")


class Seat:
    """One rank."""

    def __init__(self, circle: Circle, rank: int) -> None:
        self.circle = circle
        self.rank = rank
        self.size = circle.size

    async def gather(self, data: bytes) -> list[bytes]:
        return await self.circle.join(self.rank, data)

    def close(self) -> None:
        self.circle.leave(self.rank)


class ByRank(dict[int, Any]):
    """A setting that is not the same for all."""


def at_once(size: int, work: Callable[[int], Result]) -> list[Result]:
    """What each rank does, in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def on_all(bucket: Any, size: int, work: Callable[[Publisher, int], Result], **settings: Any) -> list[Result]:
    """The same for ranks that have a publisher each."""
    circle = Circle(size)

    def one(rank: int) -> Result:
        mine: dict[str, Any] = {
            name: value.get(rank) if isinstance(value, ByRank) else value for name, value in settings.items()
        }
        with Publisher(bucket, ranks=circle.seat(rank), threads=1, **mine) as publisher:
            return work(publisher, rank)

    return at_once(size, one)


# --- their weights ---------------------------------------------------------------------------------------------------

WHOLE = {"norm", "scale", "none"}
"""What every rank holds all of."""


def initial() -> Arrays:
    return {
        "layer.weight": np.linspace(-1, 1, 7 * 64, dtype=np.float16).reshape(7, 64),
        "short": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.arange(5, dtype=np.float16),
        "norm": np.linspace(0, 1, 5, dtype=np.float32),
        "scale": np.array(0.5, np.float32),
        "none": np.zeros((0, 3), np.float32),
    }


def at_step(step: int) -> Arrays:
    """Every weight that changes says which step it is of."""
    weights = initial()
    for past in range(1, step + 1):
        weights["layer.weight"][past % 7, past % 64] += 1
    weights["short"][:] = step
    weights["bias"][:] = step
    weights["norm"][:] = step
    return weights


def shard(weights: Arrays, rank: int, size: int) -> Arrays:
    """As FSDP cuts them: the first ranks have the same number of rows, the last ones fewer or none."""
    mine: Arrays = {}
    for name, whole in read_weights(weights).items():
        if name in WHOLE:
            mine[name] = whole
            continue
        each = -(-whole.shape[0] // size)
        first, last = min(rank * each, whole.shape[0]), min((rank + 1) * each, whole.shape[0])
        row = whole.count // whole.shape[0]
        if first < last:
            mine[name] = Tensor(whole.dtype, whole.shape, whole.bits[first * row : last * row].copy(), (first, last))
    return mine


def steps(bucket: Troubled) -> list[int | None]:
    return [commit.step for commit in commits_in(bucket) if commit.kind != "fence"]


def check_no_mixture(bucket: Troubled) -> None:
    """Every version holds the weights of its own step, and of no other."""
    for commit in commits_in(bucket):
        if commit.kind in ("anchor", "delta"):
            assert commit.step is not None
            assert commit.after == digest(at_step(commit.step)).hex
            assert version_in(bucket, commit.version) == digest(at_step(commit.step))


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


# --- tests -----------------------------------------------------------------------------------------------------------


@SIZES
class TestVersions:
    def test_are_what_one_process_publishes(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> list[int]:
            return [publisher.publish(shard(at_step(step), rank, size), step=step).wait(10) for step in range(5)]

        assert on_all(bucket, size, work) == [[1, 2, 3, 4, 5]] * size

        alone = in_memory()
        with Publisher(alone) as publisher:
            for step in range(5):
                publisher.publish(at_step(step), step=step).wait(10)
        ours, theirs = commits_in(bucket), commits_in(alone)
        assert [(one.kind, one.step, one.before, one.after, one.changed) for one in ours] == [
            (one.kind, one.step, one.before, one.after, one.changed) for one in theirs
        ]
        assert run_in(bucket).tensors == run_in(alone).tensors
        check_no_mixture(bucket)

    def test_have_a_file_of_each_rank(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, size), step=0).wait(10)

        on_all(bucket, size, work)
        files = commits_in(bucket)[1].files
        assert [file.rank for file in files] == list(range(size))
        assert all(f"/e1-r{rank}-" in file.path for rank, file in enumerate(files))

    def test_of_a_rank_with_nothing_new_have_no_file_of_it(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            weights = at_step(0)
            publisher.publish(shard(weights, rank, size), step=0).wait(10)
            weights["layer.weight"][6, 3] += 1
            publisher.publish(shard(weights, rank, size), step=0).wait(10)
            publisher.publish(shard(weights, rank, size), step=0).wait(10)

        on_all(bucket, size, work)
        assert [[file.rank for file in commit.files] for commit in commits_in(bucket)[2:]] == [[size - 1], []]
        assert asyncio.run(verify_run(bucket, Runtime(), rebuild=True)).fine

    def test_while_they_are_published_every_rank_knows_them(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> tuple[Any, ...]:
            publication = publisher.publish(shard(at_step(3), rank, size), step=3, metrics={"rank": rank})
            publication.wait(10)
            return publisher.version, publisher.state, publication.commit

        (version, state, commit), *others = on_all(bucket, size, work)
        assert all(other == (version, state, commit) for other in others)
        assert (version, state) == (1, digest(at_step(3)).hex)
        assert commit == commits_in(bucket)[1]
        assert commit.metrics == {"rank": 0.0}
        assert commit.stages["upload"].bytes == commit.nbytes

    def test_reach_a_follower(self, tmp_path: Path, size: int) -> None:
        """Anchors, deltas and shortcuts of several files, as any follower sees them."""
        url = tmp_path / "bucket"

        def work(publisher: Publisher, rank: int) -> None:
            for step in range(6):
                publisher.publish(shard(at_step(step), rank, size), step=step).wait(10)

        on_all(url, size, work, anchor_every=2)
        with Follower(url, into=tmp_path / "late") as follower:
            follower.once()
            found = load_file(follower.checkpoint() / "model.safetensors")
        for name, value in at_step(5).items():
            np.testing.assert_array_equal(found[name], value)
        assert asyncio.run(verify_run(open_bucket(url), Runtime(), rebuild=True)).fine

    def test_that_only_some_ranks_hold(self, bucket: Troubled, size: int) -> None:
        """As pipeline stages do: whole tensors, each on one rank."""
        names = list(initial())

        def work(publisher: Publisher, rank: int) -> None:
            for step in range(3):
                mine: dict[str, Any] = {
                    name: value for name, value in at_step(step).items() if names.index(name) % size == rank
                }
                publisher.publish(mine, step=step).wait(10)

        on_all(bucket, size, work)
        check_no_mixture(bucket)


class TestTiming:
    """Trainers of different ranks are never at the same point."""

    @pytest.mark.parametrize("slow_rank", [0, 1, 2])
    def test_the_same_step_of_every_rank(self, bucket: Troubled, slow_rank: int) -> None:
        async def slowly(act: Act) -> Any:
            await asyncio.sleep(0.02)
            return await act()

        bucket.trouble("put", "deltas/", slowly, times=1e9)

        def work(publisher: Publisher, rank: int) -> list[Publication]:
            published = []
            for step in range(40):
                if rank == slow_rank:
                    time.sleep(0.003)
                published.append(publisher.publish(shard(at_step(step), rank, 3), step=step))
            return published

        ranks = on_all(bucket, 3, work)
        check_no_mixture(bucket)
        assert steps(bucket)[-1] == 39
        assert len(steps(bucket)) < 40
        for publications in ranks:
            assert all(one.done for one in publications)
            assert [one.wait(0) for one in publications] == sorted(one.wait(0) for one in publications)
        assert len({tuple(one.version for one in publications) for publications in ranks}) == 1

    def test_a_rank_that_is_far_behind(self, bucket: Troubled) -> None:
        """Others go on, as far as one capture ahead of what they agreed on."""
        go = threading.Event()

        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            if rank == 1:
                go.wait(10)
            publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
            if rank == 0:
                time.sleep(0.2)
                assert not publication.done
                go.set()
            return publication.wait(10)

        assert on_all(bucket, 2, work) == [2, 2]

    def test_a_rank_that_does_not_come_says_so(self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(turns, "LATE", 0.05)
        heard: list[Event] = []

        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            if rank == 1:
                time.sleep(0.5)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)

        on_all(bucket, 2, work, on_event=heard.append)
        assert any("rank 1 has not published yet what others have" in event.message for event in heard)

    def test_a_rank_that_never_came_says_so(self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(setup, "LATE", 0.05)
        heard: list[Event] = []

        def work(publisher: Publisher, rank: int) -> int:
            if rank == 1:
                time.sleep(0.5)
            return publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)

        on_all(bucket, 2, work, on_event=heard.append)
        assert any("rank 0 waits for the first publish of all others" in event.message for event in heard)

    def test_only_one_rank_waits_for_what_others_go_past(
        self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its weights cannot be published any more, and it would wait for ever."""
        monkeypatch.setattr(turns, "LATE", 0.1)
        go = threading.Event()

        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            if rank == 0:
                go.wait(10)
            publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
            if rank == 1:
                publication = publisher.publish(shard(at_step(2), rank, 2), step=2)
                go.set()
            with pytest.raises(WeightwireError, match="waits for publish 2, and others have gone on to publish 3"):
                publication.wait(10)
            if rank == 0:
                publisher.publish(shard(at_step(2), rank, 2), step=2)
            publisher.publish(shard(at_step(3), rank, 2), step=3).wait(10)

        on_all(bucket, 2, work)
        assert steps(bucket)[-1] == 3
        check_no_mixture(bucket)

    @SIZES
    def test_blocking(self, bucket: Troubled, size: int) -> None:
        def work(publisher: Publisher, rank: int) -> list[int | None]:
            return [publisher.publish(shard(at_step(step), rank, size), step=step).version for step in range(4)]

        assert on_all(bucket, size, work, blocking=True) == [[1, 2, 3, 4]] * size
        check_no_mixture(bucket)

    def test_what_waits_is_published_in_the_end(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            for step in range(10):
                publisher.publish(shard(at_step(step), rank, 2), step=step)

        on_all(bucket, 2, work)
        assert steps(bucket)[-1] == 9
        check_no_mixture(bucket)

    def test_nothing_at_all(self, bucket: Troubled) -> None:
        on_all(bucket, 2, lambda publisher, rank: None)
        assert asyncio.run(bucket.list("")) == []


class TestAnchors:
    def test_of_all_ranks(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            for step in range(7):
                publisher.publish(shard(at_step(step), rank, 3), step=step).wait(10)

        on_all(bucket, 3, work, anchor_every=2)
        found = asyncio.run(bucket.list("shortcuts/"))
        assert found
        for one in found:
            shortcut = unseal(asyncio.run(bucket.get(one.path)), Shortcut, one.path).record
            assert [file.rank for file in shortcut.files] == [0, 1, 2]
            assert shortcut.after == digest(at_step(shortcut.version - 1)).hex
        check_no_mixture(bucket)  # which begins with them

    def test_that_fail_on_one_rank_harm_nothing(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/3/e1-r1", denied)

        def work(publisher: Publisher, rank: int) -> None:
            for step in range(4):
                publisher.publish(shard(at_step(step), rank, 2), step=step).wait(10)

        on_all(bucket, 2, work, anchor_every=2)
        assert not [one for one in asyncio.run(bucket.list("shortcuts/")) if one.path.startswith("shortcuts/3/")]
        check_no_mixture(bucket)


class TestFailures:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_of_one_rank_are_those_of_all(self, bucket: Troubled, rank: int) -> None:
        bucket.trouble("put", f"deltas/2/e1-r{rank}", denied)

        def work(publisher: Publisher, rank: int) -> list[Any]:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            failed = publisher.publish(shard(at_step(1), rank, 2), step=1)
            with pytest.raises(PermissionDenied):
                failed.wait(10)
            return [publisher.publish(shard(at_step(2), rank, 2), step=2).wait(10)]

        assert on_all(bucket, 2, work) == [[2], [2]]
        assert steps(bucket) == [0, 2]
        check_no_mixture(bucket)

    def test_of_the_first_version(self, bucket: Troubled) -> None:
        bucket.trouble("put", "anchors/1/e1-r1", denied)

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(PermissionDenied):
                publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)

        assert on_all(bucket, 2, work) == [1, 1]
        check_no_mixture(bucket)

    @pytest.mark.parametrize("blocking", [False, True])
    def test_a_publish_that_fails_on_one_rank(self, bucket: Troubled, blocking: bool) -> None:
        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            weights = shard(at_step(1), rank, 2)
            if rank == 1:
                weights["layer.weight"] = np.zeros(3)
            with pytest.raises(WeightwireError):
                publisher.publish(weights, step=1).wait(10)
            return publisher.publish(shard(at_step(2), rank, 2), step=2).wait(10)

        assert on_all(bucket, 2, work, blocking=blocking) == [2, 2]
        assert steps(bucket) == [0, 2]
        check_no_mixture(bucket)

    def test_what_cannot_be_read_on_one_rank(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> int:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            with pytest.raises(WeightwireError):
                publisher.publish({"x": "y"} if rank else shard(at_step(1), rank, 2), step=1).wait(10)
            return publisher.publish(shard(at_step(2), rank, 2), step=2).wait(10)

        assert on_all(bucket, 2, work) == [2, 2]
        assert steps(bucket) == [0, 2]

    def test_a_first_publish_that_fails_on_one_rank(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(WeightwireError):
                publisher.publish({"x": "y"} if rank else shard(at_step(0), rank, 2), step=0).wait(10)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)

        assert on_all(bucket, 2, work) == [1, 1]
        assert steps(bucket) == [1]

    def test_shards_that_do_not_fit(self, bucket: Troubled) -> None:
        """All hear of it at once, and may try again."""

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(CheckpointError, match="no rank has rows"):
                publisher.publish(shard(at_step(0), rank, 3), step=0)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)

        assert on_all(bucket, 2, work) == [1, 1]
        assert steps(bucket) == [1]

    def test_ranks_at_different_steps(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publication = publisher.publish(shard(at_step(rank), rank, 2), step=rank)
            with pytest.raises(WeightwireError, match="different steps"):
                publication.wait(10)

        on_all(bucket, 2, work)
        assert asyncio.run(bucket.list("commits/")) == []

    def test_a_run_that_cannot_be_started(self, bucket: Troubled) -> None:
        bucket.trouble("create", "run.json", denied, times=1)

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(PermissionDenied):
                publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)

        assert on_all(bucket, 2, work) == [1, 1]

    def test_a_bucket_that_cannot_be_used(self, bucket: Troubled) -> None:
        bucket.trouble("create", "probe/", denied, times=1e9)
        circle = Circle(2)

        def one(rank: int) -> str:
            with pytest.raises(BucketError) as caught:
                Publisher(bucket, ranks=circle.seat(rank))
            return caught.value.message

        mine, theirs = at_once(2, one)
        assert theirs == f"rank 0: {mine}"

    def test_being_fenced_off_is_told_to_all(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            if rank == 0:
                with Publisher(bucket) as other:
                    assert other.publish(at_step(5), step=5).wait(10) == 3
            publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
            with pytest.raises(Fenced):
                publication.wait(10)
            with pytest.raises(Fenced):
                publisher.publish(shard(at_step(2), rank, 2), step=2)

        on_all(bucket, 2, work)
        assert steps(bucket) == [0, 5]

    @pytest.mark.parametrize("moment", ["before", "between", "during"])
    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_rank_that_is_gone(self, bucket: Troubled, moment: str, gone: int) -> None:
        """Nobody waits for it for ever, and nothing half is committed."""
        circle = Circle(3)
        last = 1 if moment == "before" else 2

        def one(rank: int) -> None:
            seat = circle.seat(rank)
            publisher = Publisher(bucket, ranks=seat, threads=1)
            if moment != "before":
                publisher.publish(shard(at_step(0), rank, 3), step=0).wait(10)
            if rank == gone:
                if moment == "during":

                    async def die(act: Act) -> Any:
                        circle.leave(gone)
                        return await act()

                    bucket.trouble("put", f"deltas/2/e1-r{gone}", die)
                else:
                    seat.close()
            with pytest.raises(RankFailed):
                publisher.publish(shard(at_step(1), rank, 3), step=1).wait(10)
            with pytest.raises(RankFailed):
                publisher.publish(shard(at_step(2), rank, 3), step=2)
            publisher.close(10)

        at_once(3, one)
        if last == 2:
            assert steps(bucket) == [0]
            check_no_mixture(bucket)

    def test_a_rank_that_leaves_too_early(self, bucket: Troubled) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            if rank == 0:
                publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
                with pytest.raises(
                    WeightwireError, match="closed its publisher after publish 1, and others have gone on"
                ):
                    publication.wait(10)

        on_all(bucket, 2, work)
        assert steps(bucket) == [0]

    def test_a_rank_whose_publisher_rank_0_has_closed(self, bucket: Troubled) -> None:
        ended = threading.Event()

        def work(publisher: Publisher, rank: int) -> None:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            if rank == 1:
                ended.wait(10)
                time.sleep(0.1)
                with pytest.raises(WeightwireError, match="rank 0 has closed"):
                    publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)
            else:
                threading.Timer(0.1, ended.set).start()

        on_all(bucket, 2, work)
        assert steps(bucket) == [0]

    def test_other_tensors_than_the_run_has(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish({"x": np.zeros(3, np.float32)}).wait(10)

        def work(publisher: Publisher, rank: int) -> None:
            for _ in range(2):
                with pytest.raises(SchemaChanged):
                    publisher.publish(shard(at_step(0), rank, 2), step=0)

        on_all(bucket, 2, work)
        assert [commit.kind for commit in commits_in(bucket)] == ["fence", "anchor"]  # nobody was fenced off

    def test_a_run_that_another_starts_meanwhile(self, bucket: Troubled) -> None:
        """What was uploaded for its first version is given up, and the next one is an anchor in the other's run."""
        gate = threading.Event()

        async def overtaken(act: Act) -> Any:
            await act()
            with Publisher(Troubled(bucket.inner)) as other:
                other.publish(at_step(7), step=7).wait(10)
            gate.set()

        bucket.trouble("put", "anchors/1/e1-r0", overtaken)

        def work(publisher: Publisher, rank: int) -> int:
            with pytest.raises(WeightwireError, match="another publisher has started the run"):
                publisher.publish(shard(at_step(0), rank, 2), step=0).wait(10)
            return publisher.publish(shard(at_step(1), rank, 2), step=1).wait(10)

        assert on_all(bucket, 2, work) == [3, 3]
        assert gate.is_set()
        assert steps(bucket) == [7, 1]
        check_no_mixture(bucket)


class TestRestart:
    def publish(self, bucket: Troubled, size: int, *numbers: int, **settings: Any) -> None:
        def work(publisher: Publisher, rank: int) -> None:
            for step in numbers:
                publisher.publish(shard(at_step(step), rank, size), step=step).wait(10)

        on_all(bucket, size, work, **settings)

    def kinds(self, bucket: Troubled) -> list[str]:
        return [commit.kind for commit in commits_in(bucket)]

    def test_begins_with_an_anchor_and_says_so(self, bucket: Troubled) -> None:
        heard: list[Event] = []
        self.publish(bucket, 2, 0, 1)
        self.publish(bucket, 3, 2, 3, on_event=heard.append)
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "anchor", "delta"]
        assert len([event for event in heard if "the next version is an anchor" in event.message]) == 1
        check_no_mixture(bucket)

    @pytest.mark.parametrize("given", ["published", "base"])
    def test_with_what_was_published_at_hand(self, bucket: Troubled, given: str) -> None:
        self.publish(bucket, 2, 0, 1)
        self.publish(bucket, 3, 2, 3, **{given: at_step(1)})
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "delta", "delta"]
        check_no_mixture(bucket)

    def test_with_something_else_at_hand(self, bucket: Troubled) -> None:
        self.publish(bucket, 2, 0, 1)
        self.publish(bucket, 2, 2, published=at_step(0))
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "anchor"]
        check_no_mixture(bucket)

    def test_goes_on_alone(self, bucket: Troubled) -> None:
        self.publish(bucket, 2, 0, 1)
        with Publisher(bucket) as publisher:
            publisher.publish(at_step(2), step=2).wait(10)
        assert self.kinds(bucket) == ["fence", "anchor", "delta", "fence", "delta"]
        self.publish(bucket, 2, 3)
        check_no_mixture(bucket)

    def test_a_follower_goes_on_over_it(self, tmp_path: Path) -> None:
        url = tmp_path / "bucket"
        self.publish(url, 2, 0, 1)  # type: ignore[arg-type]
        with Follower(url, into=tmp_path / "replica") as follower:
            follower.once()
            self.publish(url, 3, 2, 3)  # type: ignore[arg-type]
            follower.once()
            assert follower.version == 5
            found = load_file(follower.checkpoint() / "model.safetensors")
        np.testing.assert_array_equal(found["norm"], at_step(3)["norm"])

    @SIZES
    def test_a_new_run_from_a_base(self, bucket: Troubled, size: int) -> None:
        self.publish(bucket, size, 1, 2, base=at_step(0), source="elsewhere")
        _, base, *rest = commits_in(bucket)
        assert (base.kind, base.after, base.source) == ("base", digest(at_step(0)).hex, "elsewhere")
        assert [commit.kind for commit in rest] == ["delta", "delta"]
        assert version_in(bucket, base=at_step(0)) == digest(at_step(2))

    def test_a_base_that_only_one_rank_was_given(self, bucket: Troubled) -> None:
        heard: list[Event] = []
        self.publish(bucket, 2, 1, base=ByRank({0: at_step(0)}), on_event=heard.append)
        assert self.kinds(bucket) == ["fence", "anchor"]
        assert any("not all ranks were given the same weights" in event.message for event in heard)

    def test_a_base_of_another_model(self, bucket: Troubled) -> None:
        with pytest.raises(SchemaChanged):
            self.publish(bucket, 2, 1, base={"x": np.zeros(3)})


class TestChance:
    """Slow ranks, ranks that go, requests that fail or whose replies are lost, restarts with other numbers of ranks."""

    @pytest.mark.parametrize(
        "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]
    )
    def test_no_version_is_ever_a_mixture(self, bucket: Troubled, seed: int) -> None:
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
        """One job, from its start to its end, which may come early."""
        size = chance.choice([2, 3])
        circle = Circle(size)
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
                    publisher.close(20)
            return [one.version for one in published if one.done]

        bucket.calm()
        bucket.trouble("create put get list find read_into", "", unlucky, times=1e9)
        versions = at_once(size, one)
        if not leaves:
            assert all(each == versions[0] for each in versions)


class TestSharing:
    def share(self, *ranks: Arrays) -> list[set[str]]:
        return [set(names) for names in partition_rows([holdings_of(read_weights(one), {}) for one in ranks]).names]

    def test_what_all_hold_is_spread_by_size(self) -> None:
        whole = {name: np.zeros(size, np.uint8) for name, size in {"a": 8, "b": 5, "c": 4, "d": 1}.items()}
        assert self.share(whole, whole) == [{"a", "d"}, {"b", "c"}]

    def test_who_has_rows_of_its_own_gets_less_of_what_all_hold(self) -> None:
        part = Tensor(read_weights({"w": np.zeros(9, np.uint8)})["w"].dtype, (9,), np.zeros(9, np.uint8), (0, 9))
        assert self.share({"w": part, "x": np.zeros(4)}, {"x": np.zeros(4)}) == [{"w"}, {"x"}]

    def test_the_same_rows_on_two_ranks(self) -> None:
        """As a model that is sharded and replicated."""
        weights = {"layer.weight": initial()["layer.weight"]}
        ranks = [shard(weights, rank, 2) for rank in (0, 1, 0, 1)]
        assert self.share(*ranks) == [{"layer.weight"}, {"layer.weight"}, set(), set()]

    def test_rows_that_nobody_has(self) -> None:
        weights = {"w": np.zeros((9, 2))}
        for ranks, missing in {(0, 1): "6 to 9", (1, 2): "0 to 3", (0, 2): "3 to 6"}.items():
            with pytest.raises(CheckpointError, match=f"'w': no rank has rows {missing}"):
                self.share(*(shard(weights, rank, 3) for rank in ranks))

    def test_rows_that_two_have(self) -> None:
        weights = {"w": np.zeros((6, 2))}
        with pytest.raises(CheckpointError, match="rows 2 to 3 are in two shards"):
            self.share(shard(weights, 0, 2), *(shard(weights, rank, 3) for rank in (1, 2)))
        with pytest.raises(CheckpointError, match="are in two shards"):
            self.share(weights, shard(weights, 0, 2))

    def test_different_shapes(self) -> None:
        with pytest.raises(CheckpointError, match=r"is F64 \[3\] on rank 0, and F64 \[4\] on rank 1"):
            self.share({"w": np.zeros(3)}, {"w": np.zeros(4)})


class Word(msgspec.Struct, frozen=True):
    text: str


class TestMeeting:
    def meet(self, *works: Callable[[Meeting], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What became of each rank's part."""

        async def whole() -> list[Any]:
            circle = Circle(len(works))
            parts = [work(Meeting(circle.seat(rank))) for rank, work in enumerate(works)]
            return await asyncio.gather(*parts, return_exceptions=True)

        return asyncio.run(whole())

    async def say(self, text: str) -> Word:
        return Word(text)

    async def fail(self, problem: Exception) -> Word:
        raise problem

    def test_all_hear_what_all_say(self) -> None:
        heard = self.meet(*(lambda one, text=text: one.meet("x", self.say(text), Word) for text in "abc"))
        assert heard == [[Word("a"), Word("b"), Word("c")]] * 3

    def test_one_that_fails_fails_for_all(self) -> None:
        problem = BucketError("it is full", hint="make room")
        mine, theirs = self.meet(
            lambda one: one.meet("x", self.say("a"), Word), lambda one: one.meet("x", self.fail(problem), Word)
        )
        assert theirs is problem
        assert (type(mine), mine.message, mine.hint) == (BucketError, "rank 1: it is full", "make room")

    def test_what_others_have_not_finished_is_cancelled(self) -> None:
        cancelled = []

        async def long() -> Word:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return Word("")

        async def patient(one: Meeting) -> Any:
            return await one.meet("x", long(), Word)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightwire.publisher.ranks.protocol.PULSE", 0.01)
            mine, theirs = self.meet(patient, lambda one: one.meet("x", self.fail(BucketError("no")), Word))
        assert (type(mine), type(theirs), cancelled) == (BucketError, BucketError, [True])

    def test_what_nobody_can_go_on_from_comes_first(self) -> None:
        heard = self.meet(
            lambda one: one.meet("x", self.fail(BucketError("no")), Word),
            lambda one: one.meet("x", self.fail(ZeroDivisionError("a bug")), Word),
            lambda one: one.meet("x", self.fail(BucketError("no")), Word),
        )
        assert [type(one) for one in heard] == [RankFailed, ZeroDivisionError, RankFailed]
        assert "rank 1: the publisher failed (ZeroDivisionError: a bug)" in heard[0].message

    def test_ranks_that_are_out_of_step(self) -> None:
        heard = self.meet(
            lambda one: one.meet("x", self.say("a"), Word), lambda one: one.meet("y", self.say("b"), Word)
        )
        assert all(isinstance(one, RankFailed) and "out of step" in one.message for one in heard)

    def test_only_rank_0_works(self) -> None:
        assert self.meet(lambda one: one.hear("x", self.say("a"), Word), lambda one: one.hear("x", None, Word)) == [
            Word("a"),
            Word("a"),
        ]
