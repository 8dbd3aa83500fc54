"""The loop around lost data: it retries, records a lost file at every failure, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from support.failing_bucket import in_memory
from weightwire.catchup.detour import around_lost_data
from weightwire.catchup.fetch import Fetcher
from weightwire.catchup.plan import NEED_ANCHOR, NoPath
from weightwire.chain.record_paths import data_path
from weightwire.chain.records import DataFile
from weightwire.errors import (
    BucketError,
    CorruptDelta,
    DataGone,
    NoBucket,
    NotFound,
    Truncated,
    Unavailable,
    WeightwireError,
)
from weightwire.system.runtime import Runtime


def file_of(version: int) -> DataFile:
    sha256 = f"{version:064x}"
    return DataFile(data_path("delta", version, 1, 0, sha256), 10, sha256, 0)


class Attempts:
    """Attempts that fail, each because of another lost file, before one succeeds or none is left."""

    def __init__(self, failures: Iterable[WeightwireError], end: Callable[[], str] = lambda: "there") -> None:
        self.fetcher = Fetcher(in_memory(), Runtime())
        self.warnings: list[str] = []
        self._failures = list(failures)
        self._end = end

    def run(self) -> str:
        return asyncio.run(around_lost_data(self.fetcher, self._attempt, self.warnings.append))

    async def _attempt(self) -> str:
        if len(self.fetcher.lost) < len(self._failures):
            version = len(self.fetcher.lost)
            with self.fetcher.noting_lost((file_of(version),)):
                raise self._failures[version]
        return self._end()


def blocked(by: str) -> Callable[[], str]:
    def end() -> str:
        raise NoPath("no anchor leads to version 9", hint="publish one", blocked_by=by)

    return end


def test_the_first_attempt_may_succeed() -> None:
    ways = Attempts([])
    assert ways.run() == "there"
    assert not ways.warnings


@pytest.mark.parametrize("count", [1, 3, 40])
def test_detour_retries_and_warns_about_each_lost_file(count: int) -> None:
    ways = Attempts([(NotFound, Truncated, CorruptDelta)[i % 3](f"file {i} is lost") for i in range(count)])
    assert ways.run() == "there"
    assert ways.warnings == [f"file {i} is lost; took another path" for i in range(count)]
    assert set(ways.fetcher.lost) == {file_of(i).path for i in range(count)}


@pytest.mark.parametrize("kind", [NotFound, Truncated, CorruptDelta])
def test_detour_raises_if_an_attempt_adds_no_lost_file(kind: type[WeightwireError]) -> None:
    """The failed file is not part of a path: a side file, for example."""
    tries = []

    async def attempt() -> None:
        tries.append(1)
        raise kind("config.json: is lost")

    with pytest.raises(kind, match=r"config\.json"):
        asyncio.run(around_lost_data(Fetcher(in_memory(), Runtime()), attempt, lambda message: None))
    assert len(tries) == 1


@pytest.mark.parametrize("problem", [Unavailable("later"), BucketError("no"), NoBucket("no such bucket")])
def test_a_bucket_that_fails_does_not_count_as_lost_data(problem: WeightwireError) -> None:
    ways = Attempts([problem])
    with pytest.raises(type(problem)):
        ways.run()
    assert not ways.fetcher.lost


@pytest.mark.parametrize(
    ("lost", "raised"), [(NotFound, DataGone), (Truncated, Truncated), (CorruptDelta, CorruptDelta)]
)
def test_error_without_a_path_names_the_file_that_blocks_it(
    lost: type[WeightwireError], raised: type[WeightwireError]
) -> None:
    ways = Attempts([Truncated("an anchor"), lost("a delta"), Truncated("another anchor")], blocked(file_of(1).path))
    with pytest.raises(raised, match="a delta, and no anchor leads past it") as caught:
        ways.run()
    assert NEED_ANCHOR in str(caught.value.hint)
    assert not ways.warnings


def test_detour_without_any_lost_file_raises_data_gone() -> None:
    with pytest.raises(DataGone, match="no anchor leads to version 9") as caught:
        Attempts([], blocked("")).run()
    assert caught.value.hint == "publish one"
