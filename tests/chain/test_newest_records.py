"""The newest commits, the newest epoch and the newest gc record, which status and page show."""

from __future__ import annotations

import pytest

from support.clocked_bucket import Clocked, clocked, first_weights, publish, run
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.record_paths import commit_path, epoch_path, gc_path, heartbeat_path, number_of, version_of
from weightwire.chain.records import Epoch, Gc, seal
from weightwire.errors import BrokenChain


@pytest.fixture
def bucket() -> Clocked:
    """Versions 0 to 6."""
    bucket = clocked()
    publish(bucket, first_weights(), 6)
    return bucket


@pytest.fixture
def chain(bucket: Clocked) -> ChainReader:
    return ChainReader(bucket, run(read_run(bucket)))


def claim(chain: ChainReader, epoch: int) -> bytes:
    return seal(Epoch(run=chain.run.run, epoch=epoch, write_id="0" * 32, time=5.0, host=str(epoch))).data


class TestNewestEpoch:
    def test_newest_epoch_is_chosen_by_number_and_not_by_text(self, bucket: Clocked, chain: ChainReader) -> None:
        for epoch in (99_999_999, 100_000_000):  # the second sorts before the first as text
            bucket.write(epoch_path(epoch), claim(chain, epoch))
        found = run(chain.newest_epoch(run(bucket.list("epochs/"))))
        assert found is not None
        assert found.epoch == 100_000_000

    def test_newest_epoch_skips_invalid_records(self, bucket: Clocked, chain: ChainReader) -> None:
        bucket.write(epoch_path(7), claim(chain, 7))
        bucket.write(epoch_path(8), b"nonsense")
        bucket.write(epoch_path(9), claim(chain, 10))
        bucket.write("epochs/11.json", claim(chain, 11))
        found = run(chain.newest_epoch(run(bucket.list("epochs/"))))
        assert found is not None
        assert found.epoch == 7

    def test_newest_epoch_is_none_without_records(self, chain: ChainReader) -> None:
        assert run(chain.newest_epoch([])) is None


def test_newest_gc_record_is_of_this_run(bucket: Clocked, chain: ChainReader) -> None:
    for below, name in ((2, chain.run.run), (4, chain.run.run), (6, "0" * 32)):
        bucket.write(gc_path(below), seal(Gc(run=name, below=below)).data)
    found = run(chain.newest_gc(run(bucket.list("gc/"))))
    assert found is not None
    assert found.below == 4


class TestNewestCommits:
    @pytest.mark.parametrize(("most", "first"), [(1, 6), (3, 4), (7, 0), (100, 0)])
    def test_newest_commits_are_in_order_up_to_the_head(self, chain: ChainReader, most: int, first: int) -> None:
        assert [one.record.version for one in run(chain.read_newest(most))] == list(range(first, 7))

    def test_most_0_reads_nothing(self, chain: ChainReader) -> None:
        assert run(chain.read_newest(0)) == []

    def test_a_missing_commit_among_the_newest_is_an_error(self, bucket: Clocked, chain: ChainReader) -> None:
        run(bucket.inner.delete(commit_path(4)))
        with pytest.raises(BrokenChain, match="missing, although later versions exist"):
            run(chain.read_newest(4))


class TestPaths:
    @pytest.mark.parametrize("path_of", [commit_path, epoch_path, gc_path])
    @pytest.mark.parametrize("number", [0, 7, 10**8, 10**19])
    def test_record_path_has_a_number(self, path_of: object, number: int) -> None:
        assert callable(path_of)
        assert number_of(path_of(number)) == number

    @pytest.mark.parametrize(
        "path", ["commits/00000007.json", "epochs/7.json", "gc/1.json", "commits/x.json", heartbeat_path("00000001")]
    )
    def test_other_paths_have_no_number(self, path: str) -> None:
        assert number_of(path) is None

    def test_data_path_has_a_version(self) -> None:
        paths = ["deltas/3/x", "anchors/12/y/z", "shortcuts/0/anchor-1.json", "deltas/3", "files/3/x", "anchors/x/y"]
        assert [version_of(path) for path in paths] == [3, 12, 0, None, None, None]
