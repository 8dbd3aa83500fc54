"""The loop around lost data: it tries until a way is whole, learns from every failure, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from support.failing_bucket import in_memory
from weightwire.catchup.detour import around_lost_data
from weightwire.catchup.fetch import Fetcher
from weightwire.catchup.plan import NoWay
from weightwire.chain.records import DataFile, data_path
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


class Ways:
    """An attempt that fails in one way after the other, each time because of another file; then it succeeds, or not."""

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
        raise NoWay("no anchor leads to version 9", hint="publish one", blocked_by=by)

    return end


def test_the_first_way_may_be_whole() -> None:
    ways = Ways([])
    assert ways.run() == "there"
    assert not ways.warnings


@pytest.mark.parametrize("count", [1, 3, 40])
def test_it_tries_as_long_as_it_learns_and_tells_what_was_lost(count: int) -> None:
    ways = Ways([(NotFound, Truncated, CorruptDelta)[i % 3](f"file {i} is lost") for i in range(count)])
    assert ways.run() == "there"
    assert ways.warnings == [f"file {i} is lost; there was another way" for i in range(count)]
    assert set(ways.fetcher.lost) == {file_of(i).path for i in range(count)}


@pytest.mark.parametrize("kind", [NotFound, Truncated, CorruptDelta])
def test_it_ends_when_nothing_was_learnt(kind: type[WeightwireError]) -> None:
    """What failed is not a file that a way leads over, such as a side file."""
    tries = []

    async def attempt() -> None:
        tries.append(1)
        raise kind("config.json: is lost")

    with pytest.raises(kind, match=r"config\.json"):
        asyncio.run(around_lost_data(Fetcher(in_memory(), Runtime()), attempt, lambda message: None))
    assert len(tries) == 1


@pytest.mark.parametrize("problem", [Unavailable("later"), BucketError("no"), NoBucket("no such bucket")])
def test_a_bucket_that_fails_does_not_count_as_lost_data(problem: WeightwireError) -> None:
    ways = Ways([problem])
    with pytest.raises(type(problem)):
        ways.run()
    assert not ways.fetcher.lost


@pytest.mark.parametrize(
    ("lost", "raised"), [(NotFound, DataGone), (Truncated, Truncated), (CorruptDelta, CorruptDelta)]
)
def test_where_no_way_is_left_it_names_the_file_that_blocks_it(
    lost: type[WeightwireError], raised: type[WeightwireError]
) -> None:
    ways = Ways([Truncated("an anchor"), lost("a delta"), Truncated("another anchor")], blocked(file_of(1).path))
    with pytest.raises(raised, match="a delta, and no anchor leads past it") as caught:
        ways.run()
    assert "publish a new anchor" in str(caught.value.hint)
    assert not ways.warnings


def test_where_there_never_was_a_way_it_says_so() -> None:
    with pytest.raises(DataGone, match="no anchor leads to version 9") as caught:
        Ways([], blocked("")).run()
    assert caught.value.hint == "publish one"
