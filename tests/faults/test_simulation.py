"""The real publisher, follower and upkeep in a runtime of faults: see faults/simulation.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import weightwire.chain.writer
import weightwire.upkeep
from faults.simulated_runtime import Deadlock, SimLoop
from faults.simulation import attempt, simulate
from weightwire.bucket.bucket import Bucket
from weightwire.chain.writer import ChainWriter, create_until_taken
from weightwire.errors import AlreadyExists, BucketError
from weightwire.publisher.copy_advance import CopyAdvance
from weightwire.system.runtime import Runtime

SEEDS = int(os.environ.get("WEIGHTWIRE_SEEDS", "300"))


def first_failure(seeds: range) -> str | None:
    return next((problem for _, problem in map(attempt, seeds) if problem), None)


@pytest.mark.slow
def test_no_seed_breaks_a_promise() -> None:
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        failed = [(seed, problem) for seed, problem in pool.map(attempt, range(SEEDS), chunksize=10) if problem]
    assert not failed, "replay one with: python tests/faults/simulation.py --trace --seed ..."


@pytest.mark.parametrize("seed", [3, 14])
def test_a_seed_replays_exactly(seed: int) -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(seed, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


@pytest.mark.slow
class TestItWouldNotice:
    """The simulation is worth what it can find: here the code is broken in ways that it must see."""

    def test_a_publisher_that_does_not_fence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def take_over(self: ChainWriter) -> None:
            self.epoch = await self._claim_epoch()
            self.head = await self.chain.read_head()
            if self.head is None:
                await self.send(await self.prepare(kind="fence"))

        monkeypatch.setattr(ChainWriter, "take_over", take_over)
        assert first_failure(range(40))

    def test_a_conflict_that_is_taken_at_its_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def hasty(bucket: Bucket, path: str, data: bytes, *args: object, **kwargs: object) -> bytes:
            while True:
                try:
                    await bucket.create(path, data)
                    return data
                except AlreadyExists:
                    return b"another's" if path.startswith("commits/") else await bucket.get(path)
                except BucketError:
                    await asyncio.sleep(0.1)

        monkeypatch.setattr(weightwire.chain.writer, "create_until_taken", hasty)
        assert first_failure(range(40))

    def test_a_commit_that_is_given_up_after_it_was_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def impatient(
            bucket: Bucket,
            path: str,
            data: bytes,
            runtime: Runtime,
            warn: Callable[[str], None],
            tries: int | None = None,
        ) -> bytes:
            return await create_until_taken(
                bucket, path, data, runtime, warn, 1 if path.startswith("commits/") else tries
            )

        monkeypatch.setattr(weightwire.chain.writer, "create_until_taken", impatient)
        assert first_failure(range(40))

    def test_a_dropped_upload_that_is_not_taken_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CopyAdvance, "undo", lambda self: None)
        assert first_failure(range(60))


class TestVirtualTime:
    @pytest.fixture
    def loop(self) -> Iterator[SimLoop]:
        loop = SimLoop()
        yield loop
        loop.close()

    def test_hours_pass_at_once(self, loop: SimLoop) -> None:
        loop.run_until_complete(asyncio.sleep(7200))
        assert loop.time() == 7200

    def test_waiting_for_nothing_is_noticed(self, loop: SimLoop) -> None:
        with pytest.raises(Deadlock):
            loop.run_until_complete(loop.create_future())
