"""Ranks in threads of one process, each with a publisher, and weights sharded as by FSDP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from support.failing_bucket import Troubled
from support.run_contents import commits_in, version_in
from weightwire import digest
from weightwire.errors import RankFailed
from weightwire.publisher.publisher import Publisher
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Tensor

Arrays = dict[str, Any]
Result = TypeVar("Result")
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


class RankCircle:
    """Ranks in one process, each with its own event loop. A rank that leaves breaks the circle."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gathered = 0
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._here: dict[int, tuple[bytes, asyncio.AbstractEventLoop, asyncio.Future[list[bytes]]]] = {}

    def seat(self, rank: int) -> RankSeat:
        return RankSeat(self, rank)

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


class RankSeat:
    """One rank."""

    def __init__(self, circle: RankCircle, rank: int) -> None:
        self.circle = circle
        self.rank = rank
        self.size = circle.size

    async def gather(self, data: bytes) -> list[bytes]:
        return await self.circle.join(self.rank, data)

    def close(self) -> None:
        self.circle.leave(self.rank)


class ByRank(dict[int, Any]):
    """A setting that differs between ranks."""


def at_once(size: int, work: Callable[[int], Result]) -> list[Result]:
    """Runs `work` for each rank in a separate thread."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def on_all(bucket: Any, size: int, work: Callable[[Publisher, int], Result], **settings: Any) -> list[Result]:
    """Runs `work` with a publisher for each rank."""
    circle = RankCircle(size)

    def one(rank: int) -> Result:
        mine: dict[str, Any] = {
            name: value.get(rank) if isinstance(value, ByRank) else value for name, value in settings.items()
        }
        with Publisher(bucket, ranks=circle.seat(rank), threads=1, **mine) as publisher:
            return work(publisher, rank)

    return at_once(size, one)


WHOLE = {"norm", "scale", "none"}
"""Tensors that every rank holds completely."""


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
    """The weights at a step. Changed weights identify the step."""
    weights = initial()
    for past in range(1, step + 1):
        weights["layer.weight"][past % 7, past % 64] += 1
    weights["short"][:] = step
    weights["bias"][:] = step
    weights["norm"][:] = step
    return weights


def shard(weights: Arrays, rank: int, size: int) -> Arrays:
    """The rows of a rank, as FSDP splits them. The last ranks have fewer rows or none."""
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
    """Checks that every version holds the weights of one step."""
    for commit in commits_in(bucket):
        if commit.kind in ("anchor", "delta"):
            assert commit.step is not None
            assert commit.after == digest(at_step(commit.step)).hex
            assert version_in(bucket, commit.version) == digest(at_step(commit.step))
