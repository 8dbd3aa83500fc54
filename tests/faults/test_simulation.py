"""The real publisher, follower and upkeep in a simulated runtime with faults. See faults/simulation.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from faults.simulated_runtime import Deadlock, SimLoop
from faults.simulation import attempt, simulate

SEEDS = int(os.environ.get("WEIGHTWIRE_SEEDS", "24"))


@pytest.mark.slow
def test_simulated_faults_break_no_promise() -> None:
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


class TestVirtualTime:
    @pytest.fixture
    def loop(self) -> Iterator[SimLoop]:
        loop = SimLoop()
        yield loop
        loop.close()

    def test_virtual_hours_pass_instantly(self, loop: SimLoop) -> None:
        loop.run_until_complete(asyncio.sleep(7200))
        assert loop.time() == 7200

    def test_a_deadlock_is_noticed(self, loop: SimLoop) -> None:
        with pytest.raises(Deadlock):
            loop.run_until_complete(loop.create_future())
