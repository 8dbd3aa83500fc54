"""The chain in a bucket: the newest is found by few requests, the oldest proven by few, none taken for another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from support.chains import ChainBucket, Commits, forged, versions
from support.failing_bucket import denied, failed, in_memory
from support.records import RUN_ID, a_run, chain_of, grow, sha, shortcut_to, store, token
from weightwire.bucket.registry import open_bucket
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.records import HEAD, RUN, HeadHint, Heartbeat, commit_path, heartbeat_path, seal, shortcut_path
from weightwire.errors import (
    BrokenChain,
    ForeignRun,
    NoRun,
    PermissionDenied,
    Unavailable,
    UnsupportedFormat,
)

Result = TypeVar("Result")

run = asyncio.run


class TestTheRun:
    def test_is_read(self) -> None:
        assert run(read_run(ChainBucket([]))) == a_run()

    def test_is_not_there_yet(self) -> None:
        with pytest.raises(NoRun, match="nothing has been published there yet"):
            run(read_run(in_memory()))

    def test_is_of_a_later_protocol(self) -> None:
        with pytest.raises(UnsupportedFormat, match=r"memory://.*/run.json"):
            run(read_run(ChainBucket([], **{RUN: b'{"format": "weightwire/2"}'})))

    def test_cannot_be_reached(self) -> None:
        bucket = ChainBucket([])
        bucket.trouble("get", RUN, failed)
        with pytest.raises(Unavailable):
            run(read_run(bucket))


class TestOneCommit:
    def test_is_read_as_it_lies_there(self) -> None:
        commits = chain_of(3)
        assert run(ChainBucket(commits).chain.read(2)) == commits[2]

    def test_is_none_where_there_is_none(self) -> None:
        assert run(ChainBucket(chain_of(3)).chain.read(3)) is None

    def test_says_another_number(self) -> None:
        bucket = ChainBucket(chain_of(3))
        bucket.put_now(commit_path(3), chain_of(3)[2].data)
        with pytest.raises(BrokenChain, match=r"memory://.*/commits/0{19}3.json: says it is version 2"):
            run(bucket.chain.read(3))

    def test_is_of_another_run(self) -> None:
        commits: Commits = []
        grow(commits, "fence", run=token("other"))
        with pytest.raises(ForeignRun):
            run(ChainBucket(commits).chain.read(0))

    def test_the_first_is_the_beginning(self) -> None:
        commits: Commits = []
        grow(commits, "fence", parent=sha("something before it"))
        with pytest.raises(BrokenChain, match="no beginning"):
            run(ChainBucket(commits).chain.read(0))

    def test_what_cannot_be_reached_is_not_taken_for_absent(self) -> None:
        bucket = ChainBucket(chain_of(3))
        bucket.trouble("get", "commits/", failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.read(3))


class TestALinkedCommit:
    def test_is_the_one_that_later_ones_name(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        assert run(bucket.chain.read_linked(1, commits[1].sha256)) == commits[1]

    def test_is_another(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 1))
        with pytest.raises(BrokenChain, match="not the commit that later ones were built on"):
            run(bucket.chain.read_linked(1, commits[1].sha256))

    def test_is_missing(self) -> None:
        with pytest.raises(BrokenChain, match="is missing, though later versions are there"):
            run(ChainBucket([]).chain.read_linked(1, sha("x")))

    def test_is_read_once(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        for _ in range(3):
            run(bucket.chain.read_linked(1, commits[1].sha256))
        assert bucket.count("get") == 1

    def test_what_is_remembered_is_not_taken_for_another(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        bucket.chain.remember(forged(commits, 1))
        assert run(bucket.chain.read_linked(1, commits[1].sha256)) == commits[1]


class TestTheNewest:
    @pytest.mark.parametrize("count", [*range(10), 31, 32, 33, 100])
    def test_is_found_without_a_hint(self, count: int) -> None:
        bucket = ChainBucket(chain_of(count))
        assert run(bucket.chain.find_head()) == count - 1
        newest = run(bucket.chain.read_head())
        assert newest == (chain_of(count)[-1] if count else None)

    @pytest.mark.parametrize("known", [-1, 0, 1, 5, 6, 36])
    @pytest.mark.parametrize("hint", [0, 5, 36, 37, 1000, 2**53 - 1])
    def test_is_found_whatever_the_hint(self, known: int, hint: int) -> None:
        bucket = ChainBucket(chain_of(37))
        bucket.hint(hint)
        assert run(bucket.chain.find_head(known)) == 36

    @pytest.mark.parametrize(
        "hint", [b"", b"{}", b"\xff", b'{"format":"weightwire/9"}', seal(HeadHint(run=token("x"), version=3)).data]
    )
    def test_is_found_with_a_hint_that_is_worth_nothing(self, hint: bytes) -> None:
        bucket = ChainBucket(chain_of(12), **{HEAD: hint})
        assert run(bucket.chain.read_hint()) is None
        assert run(bucket.chain.find_head()) == 11

    def test_is_found_where_the_hint_cannot_be_reached(self) -> None:
        bucket = ChainBucket(chain_of(12))
        bucket.trouble("get", HEAD, failed)
        assert run(bucket.chain.find_head()) == 11

    def test_is_not_guessed_where_the_bucket_cannot_be_reached(self) -> None:
        bucket = ChainBucket(chain_of(12))
        bucket.trouble("find", commit_path(10), failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.find_head())

    def test_takes_three_requests_with_a_good_hint(self) -> None:
        bucket = ChainBucket(chain_of(300))
        bucket.hint(299)
        assert run(bucket.chain.find_head()) == 299
        assert len(bucket.asked) == 3

    @pytest.mark.parametrize("hint", [None, 0, 100, 10**9])
    def test_takes_few_requests_with_none(self, hint: int | None) -> None:
        bucket = ChainBucket(chain_of(300))
        if hint is not None:
            bucket.hint(hint)
        assert run(bucket.chain.find_head()) == 299
        assert len(bucket.asked) <= 2 + 2 * 9

    def test_takes_two_requests_where_nothing_is_new(self) -> None:
        bucket = ChainBucket(chain_of(300))
        assert run(bucket.chain.find_head(299)) == 299
        assert len(bucket.asked) == 2


class TestWhatIsNew:
    def test_from_the_beginning(self) -> None:
        commits = chain_of(5)
        assert run(ChainBucket(commits).chain.read_after(None)) == commits

    def test_after_one(self) -> None:
        commits = chain_of(5)
        assert run(ChainBucket(commits).chain.read_after(commits[2])) == commits[3:]

    def test_nothing(self) -> None:
        """404 is the common answer, so it takes one request."""
        bucket = ChainBucket(chain_of(5))
        assert run(bucket.chain.read_after(chain_of(5)[4])) == []
        assert bucket.asked == [("get", commit_path(5))]

    @pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
    def test_not_more_than_asked_for(self, most: int) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        assert run(bucket.chain.read_after(commits[3], most)) == commits[4 : 4 + most]
        assert bucket.count("get") == most

    def test_all_of_it_in_turn(self) -> None:
        commits = chain_of(100)
        bucket = ChainBucket(commits)
        found: Commits = []
        while more := run(bucket.chain.read_after(found[-1] if found else None)):
            found += more
        assert found == commits

    def test_one_that_does_not_follow(self) -> None:
        commits = chain_of(5)
        bucket = ChainBucket(commits)
        bucket.rewrite(grow(commits[:4], epoch=2, kind="delta"))
        with pytest.raises(BrokenChain, match=r"commits/0{19}4.json: a new publisher must begin with a fence"):
            run(bucket.chain.read_after(commits[3]))

    def test_what_comes_before_one_that_does_not_follow(self) -> None:
        commits = chain_of(8)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 5))  # which follows from 4, but 6 does not follow from it
        accepted = run(bucket.chain.read_after(commits[2]))
        assert versions(accepted) == [3, 4, 5]
        with pytest.raises(BrokenChain, match="its parent hash is another"):
            run(bucket.chain.read_after(accepted[-1]))

    @pytest.mark.parametrize("rotten", [4, 5, 6, 7])
    def test_what_comes_before_one_that_cannot_be_read(self, rotten: int) -> None:
        commits = chain_of(8)
        bucket = ChainBucket(commits)
        bucket.put_now(commit_path(rotten), b"rotten")
        assert versions(run(bucket.chain.read_after(commits[2]))) == list(range(3, rotten))
        with pytest.raises(BrokenChain, match=f"{rotten}.json: cannot be read"):
            run(bucket.chain.read_after(commits[rotten - 1]))


class TestBack:
    def test_the_next_commit_names_the_true_hashes(self) -> None:
        commits = chain_of(71)
        chain = ChainBucket(commits).chain
        for version in range(1, 71):
            assert run(chain.back_of(commits[version - 1])) == commits[version].record.back

    def test_takes_few_requests(self) -> None:
        commits = chain_of(300)
        bucket = ChainBucket(commits)
        grow(commits)
        assert run(bucket.chain.back_of(commits[299])) == commits[300].record.back
        assert bucket.count("get") <= 8

    def test_takes_none_once_it_is_known(self) -> None:
        commits = chain_of(64)
        bucket = ChainBucket(commits)
        run(bucket.chain.back_of(commits[63]))
        bucket.asked.clear()
        run(bucket.chain.back_of(commits[63]))
        assert not bucket.asked

    def test_a_commit_that_was_tampered_with(self) -> None:
        commits = chain_of(64)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 60))
        with pytest.raises(BrokenChain, match=r"commits/0{18}60.json"):
            run(bucket.chain.back_of(commits[63]))


@pytest.fixture(scope="module")
def long() -> tuple[ChainBucket, Commits]:
    commits = chain_of(2000)
    return ChainBucket(commits), commits


class TestProof:
    @pytest.mark.parametrize("version", [0, 1, 2, 777, 1023, 1024, 1998, 1999])
    def test_of_any_earlier_version(self, long: tuple[ChainBucket, Commits], version: int) -> None:
        bucket, commits = long
        bucket.asked.clear()
        chain = ChainReader(bucket, a_run())
        assert run(chain.prove(commits[-1], version)) == commits[version].sha256
        assert len(bucket.asked) <= 11

    def test_of_every_version_of_a_short_chain(self) -> None:
        commits = chain_of(40)
        chain = ChainBucket(commits).chain
        for version in range(40):
            assert run(chain.prove(commits[39], version)) == commits[version].sha256

    def test_finds_one_that_was_tampered_with(self) -> None:
        commits = chain_of(100)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 35))  # 99 - 64
        for version in (3, 34, 35):
            with pytest.raises(BrokenChain, match="not the commit that later ones were built on"):
                run(bucket.chain.prove(commits[99], version))

    def test_finds_a_history_that_was_replaced(self) -> None:
        commits = chain_of(50)
        other = chain_of(20)
        other[9] = forged(commits, 9)
        for version in range(10, 20):
            del other[version:]
            grow(other)
        bucket = ChainBucket(commits)
        assert run(bucket.chain.prove(commits[49], 19)) != other[19].sha256
        assert run(bucket.chain.prove(commits[49], 8)) == other[8].sha256


class TestAKeyWithoutListPermission:
    def bucket(self, commits: Commits) -> ChainBucket:
        bucket = ChainBucket(commits)
        bucket.deny_missing()
        return bucket

    def test_finds_the_newest(self) -> None:
        assert run(self.bucket(chain_of(37)).chain.find_head()) == 36

    def test_finds_what_is_new(self) -> None:
        commits = chain_of(7)
        assert run(self.bucket(commits).chain.read_after(commits[3])) == commits[4:]
        assert run(self.bucket(commits).chain.read_after(commits[6])) == []

    def test_one_that_may_not_even_read_is_told_so(self) -> None:
        bucket = ChainBucket(chain_of(3))
        bucket.trouble("get find list", "", denied, times=1e9)
        for request in (bucket.chain.find_head(), bucket.chain.read(3), bucket.chain.read_after(None)):
            self.assert_denied(request)

    def assert_denied(self, request: Coroutine[Any, Any, object]) -> None:
        with pytest.raises(PermissionDenied):
            run(request)


def test_in_a_directory_too(tmp_path: Any) -> None:
    commits = chain_of(12)
    bucket = open_bucket(tmp_path)
    run(store(bucket, commits, [(shortcut_path(seal(shortcut_to(commits[9]))), seal(shortcut_to(commits[9])).data)]))
    chain = ChainReader(bucket, run(read_run(bucket)))
    assert run(chain.find_head()) == 11


class TestHeartbeats:
    def beat(self, name: str, run_id: str = RUN_ID) -> Heartbeat:
        return Heartbeat(run=run_id, name=name, version=3, head=4, lease=60.0)

    def test_is_read_at_its_path(self) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("a"): seal(self.beat("a")).data})
        assert run(bucket.chain.read_heartbeat(heartbeat_path("a"))) == self.beat("a")

    def test_a_copy_under_another_name_does_not_count(self) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("b"): seal(self.beat("a")).data})
        assert run(bucket.chain.read_heartbeat(heartbeat_path("b"))) is None

    @pytest.mark.parametrize("data", [b"{}", b"no JSON", b'{"format": "weightwire/2"}'])
    def test_is_none_where_nothing_valid_lies(self, data: bytes) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("b"): data})
        assert [run(bucket.chain.read_heartbeat(heartbeat_path(name))) for name in "ab"] == [None, None]

    def test_of_another_run_does_not_count(self) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("a"): seal(self.beat("a", token("other"))).data})
        assert run(bucket.chain.read_heartbeat(heartbeat_path("a"))) is None
