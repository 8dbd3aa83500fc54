"""ChainReader finds the newest commit and proves old ones with few requests, and rejects forged ones."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from support.chains import ChainBucket, Commits, forged, versions
from support.failing_bucket import Act, denied, failed, in_memory
from support.records import RUN_ID, a_run, chain_of, grow, sha, shortcut_to, state, store, token
from weightwire.bucket.bucket import ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.record_paths import HEAD, RUN, commit_path, heartbeat_path
from weightwire.chain.records import HeadHint, Heartbeat, seal, shortcut_path
from weightwire.errors import (
    BrokenChain,
    BucketError,
    ForeignRun,
    NoRun,
    PermissionDenied,
    Unavailable,
    UnsupportedFormat,
)

Result = TypeVar("Result")

run = asyncio.run


class TestReadRun:
    def test_run_record_is_read(self) -> None:
        assert run(read_run(ChainBucket([]))) == a_run()

    def test_a_missing_run_is_an_error(self) -> None:
        with pytest.raises(NoRun, match="nothing has been published there yet"):
            run(read_run(in_memory()))

    def test_a_run_of_a_later_protocol_is_refused(self) -> None:
        with pytest.raises(UnsupportedFormat, match=r"memory://.*/run.json"):
            run(read_run(ChainBucket([], **{RUN: b'{"format": "weightwire/2"}'})))

    def test_an_unreachable_run_record_is_not_missing(self) -> None:
        bucket = ChainBucket([])
        bucket.trouble("get", RUN, failed)
        with pytest.raises(Unavailable):
            run(read_run(bucket))


class TestRead:
    def test_reader_returns_the_stored_commit(self) -> None:
        commits = chain_of(3)
        assert run(ChainBucket(commits).chain.read(2)) == commits[2]

    def test_a_missing_commit_is_none(self) -> None:
        assert run(ChainBucket(chain_of(3)).chain.read(3)) is None

    def test_a_commit_with_another_version_number_is_refused(self) -> None:
        bucket = ChainBucket(chain_of(3))
        bucket.put_now(commit_path(3), chain_of(3)[2].data)
        with pytest.raises(BrokenChain, match=r"memory://.*/commits/0{19}3.json: claims to be version 2"):
            run(bucket.chain.read(3))

    def test_a_commit_of_another_run_is_refused(self) -> None:
        commits: Commits = []
        grow(commits, "fence", run=token("other"))
        with pytest.raises(ForeignRun):
            run(ChainBucket(commits).chain.read(0))

    def test_version_0_must_be_the_first_fence(self) -> None:
        commits: Commits = []
        grow(commits, "fence", before=state(0), after=state(0))
        with pytest.raises(BrokenChain, match="not the first commit"):
            run(ChainBucket(commits).chain.read(0))

    def test_version_0_must_name_the_hash_of_run_json(self) -> None:
        commits: Commits = []
        grow(commits, "fence", parent=sha("another run.json"))
        with pytest.raises(BrokenChain, match=r"does not belong to this run\.json"):
            run(ChainBucket(commits).chain.read(0))

    def test_run_json_that_changes_after_it_was_read_is_refused(self) -> None:
        bucket = ChainBucket(chain_of(1))
        bucket.put_now(RUN, seal(a_run(time=2.5)).data)
        with pytest.raises(BrokenChain, match="has changed since it was read"):
            run(bucket.chain.read(0))

    def test_an_unreachable_commit_is_not_missing(self) -> None:
        bucket = ChainBucket(chain_of(3))
        bucket.trouble("get", "commits/", failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.read(3))


class TestReadLinked:
    def test_linked_commit_is_returned_by_its_hash(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        assert run(bucket.chain.read_linked(1, commits[1].sha256)) == commits[1]

    def test_a_linked_commit_with_another_hash_is_refused(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 1))
        with pytest.raises(BrokenChain, match="its hash is not the one that later commits name"):
            run(bucket.chain.read_linked(1, commits[1].sha256))

    def test_a_missing_linked_commit_is_an_error(self) -> None:
        with pytest.raises(BrokenChain, match="missing, although later versions exist"):
            run(ChainBucket([]).chain.read_linked(1, sha("x")))

    def test_linked_commit_is_read_once(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        for _ in range(3):
            run(bucket.chain.read_linked(1, commits[1].sha256))
        assert bucket.count("get") == 1

    def test_a_cached_commit_with_another_hash_is_not_used(self) -> None:
        commits = chain_of(3)
        bucket = ChainBucket(commits)
        bucket.chain.remember(forged(commits, 1))
        assert run(bucket.chain.read_linked(1, commits[1].sha256)) == commits[1]


class TestFindHead:
    @pytest.mark.parametrize("count", [*range(10), 31, 32, 33, 100])
    def test_head_is_found_without_a_hint(self, count: int) -> None:
        bucket = ChainBucket(chain_of(count))
        assert run(bucket.chain.find_head()) == count - 1
        newest = run(bucket.chain.read_head())
        assert newest == (chain_of(count)[-1] if count else None)

    @pytest.mark.parametrize("known", [-1, 0, 1, 5, 6, 36])
    @pytest.mark.parametrize("hint", [0, 5, 36, 37, 1000, 2**53 - 1])
    def test_head_is_found_with_any_hint(self, known: int, hint: int) -> None:
        bucket = ChainBucket(chain_of(37))
        bucket.hint(hint)
        assert run(bucket.chain.find_head(known)) == 36

    @pytest.mark.parametrize(
        "hint", [b"", b"{}", b"\xff", b'{"format":"weightwire/9"}', seal(HeadHint(run=token("x"), version=3)).data]
    )
    def test_head_is_found_with_an_invalid_hint(self, hint: bytes) -> None:
        bucket = ChainBucket(chain_of(12), **{HEAD: hint})
        assert run(bucket.chain.read_hint()) is None
        assert run(bucket.chain.find_head()) == 11

    def test_head_is_found_with_an_unreachable_hint(self) -> None:
        bucket = ChainBucket(chain_of(12))
        bucket.trouble("get", HEAD, failed)
        assert run(bucket.chain.find_head()) == 11

    def test_an_unreachable_commit_fails_the_search_for_the_head(self) -> None:
        bucket = ChainBucket(chain_of(12))
        bucket.trouble("find", commit_path(10), failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.find_head())

    @pytest.mark.parametrize("hint", [None, 2**53 - 1])
    def test_a_store_in_which_every_version_exists_is_an_error(self, hint: int | None) -> None:
        bucket = ChainBucket(chain_of(2))
        if hint is not None:
            bucket.hint(hint)

        async def there(act: Act) -> ObjectInfo:
            return ObjectInfo("commits/x", 1, 0.0)

        bucket.trouble("find", "commits/", there, times=1e9)
        with pytest.raises(BucketError, match="exists, which no run can have") as caught:
            run(bucket.chain.find_head())
        assert caught.value.hint
        assert len(bucket.asked) < 60
        bucket.calm()
        assert run(bucket.chain.find_head()) == 1

    def test_head_is_found_in_three_requests_with_a_good_hint(self) -> None:
        bucket = ChainBucket(chain_of(300))
        bucket.hint(299)
        assert run(bucket.chain.find_head()) == 299
        assert len(bucket.asked) == 3

    @pytest.mark.parametrize("hint", [None, 0, 100, 10**9])
    def test_head_is_found_in_few_requests_with_a_bad_hint(self, hint: int | None) -> None:
        bucket = ChainBucket(chain_of(300))
        if hint is not None:
            bucket.hint(hint)
        assert run(bucket.chain.find_head()) == 299
        assert len(bucket.asked) <= 2 + 2 * 9

    def test_unchanged_head_is_found_in_two_requests(self) -> None:
        bucket = ChainBucket(chain_of(300))
        assert run(bucket.chain.find_head(299)) == 299
        assert len(bucket.asked) == 2


class TestReadAfter:
    def test_reads_commits_from_the_beginning(self) -> None:
        commits = chain_of(5)
        assert run(ChainBucket(commits).chain.read_after(None)) == commits

    def test_reads_commits_after_a_version(self) -> None:
        commits = chain_of(5)
        assert run(ChainBucket(commits).chain.read_after(commits[2])) == commits[3:]

    def test_a_read_without_new_commits_takes_one_request(self) -> None:
        bucket = ChainBucket(chain_of(5))
        assert run(bucket.chain.read_after(chain_of(5)[4])) == []
        assert bucket.asked == [("get", commit_path(5))]

    @pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
    def test_reads_at_most_the_given_number_of_commits(self, most: int) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        assert run(bucket.chain.read_after(commits[3], most)) == commits[4 : 4 + most]
        assert bucket.count("get") == most

    def test_repeated_reads_reach_the_head(self) -> None:
        commits = chain_of(100)
        bucket = ChainBucket(commits)
        found: Commits = []
        while more := run(bucket.chain.read_after(found[-1] if found else None)):
            found += more
        assert found == commits

    def test_a_commit_that_does_not_follow_is_refused(self) -> None:
        commits = chain_of(5)
        bucket = ChainBucket(commits)
        bucket.rewrite(grow(commits[:4], epoch=2, kind="delta"))
        with pytest.raises(BrokenChain, match=r"commits/0{19}4.json: a new publisher must begin with a fence"):
            run(bucket.chain.read_after(commits[3]))

    def test_commits_before_a_wrong_one_are_returned(self) -> None:
        commits = chain_of(8)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 5))  # follows 4, but 6 does not follow it
        accepted = run(bucket.chain.read_after(commits[2]))
        assert versions(accepted) == [3, 4, 5]
        with pytest.raises(BrokenChain, match="its parent hash differs"):
            run(bucket.chain.read_after(accepted[-1]))

    @pytest.mark.parametrize("rotten", [4, 5, 6, 7])
    def test_commits_before_an_unreadable_one_are_returned(self, rotten: int) -> None:
        commits = chain_of(8)
        bucket = ChainBucket(commits)
        bucket.put_now(commit_path(rotten), b"rotten")
        assert versions(run(bucket.chain.read_after(commits[2]))) == list(range(3, rotten))
        with pytest.raises(BrokenChain, match=f"{rotten}.json: cannot be read"):
            run(bucket.chain.read_after(commits[rotten - 1]))


class TestBackOf:
    def test_back_hashes_are_those_of_the_chain(self) -> None:
        commits = chain_of(71)
        chain = ChainBucket(commits).chain
        for version in range(1, 71):
            assert run(chain.back_of(commits[version - 1])) == commits[version].record.back

    def test_back_hashes_take_few_requests(self) -> None:
        commits = chain_of(300)
        bucket = ChainBucket(commits)
        grow(commits)
        assert run(bucket.chain.back_of(commits[299])) == commits[300].record.back
        assert bucket.count("get") <= 8

    def test_back_hashes_of_cached_commits_take_no_requests(self) -> None:
        commits = chain_of(64)
        bucket = ChainBucket(commits)
        run(bucket.chain.back_of(commits[63]))
        bucket.asked.clear()
        run(bucket.chain.back_of(commits[63]))
        assert not bucket.asked

    def test_a_forged_commit_is_found_among_the_back_hashes(self) -> None:
        commits = chain_of(64)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 60))
        with pytest.raises(BrokenChain, match=r"commits/0{18}60.json"):
            run(bucket.chain.back_of(commits[63]))


@pytest.fixture(scope="module")
def long() -> tuple[ChainBucket, Commits]:
    commits = chain_of(2000)
    return ChainBucket(commits), commits


class TestProve:
    @pytest.mark.parametrize("version", [0, 1, 2, 777, 1023, 1024, 1998, 1999])
    def test_any_earlier_version_is_proven_in_few_requests(
        self, long: tuple[ChainBucket, Commits], version: int
    ) -> None:
        bucket, commits = long
        bucket.asked.clear()
        chain = ChainReader(bucket, a_run())
        assert run(chain.prove(commits[-1], version)) == commits[version].sha256
        assert len(bucket.asked) <= 11

    def test_every_version_of_a_short_chain_is_proven(self) -> None:
        commits = chain_of(40)
        chain = ChainBucket(commits).chain
        for version in range(40):
            assert run(chain.prove(commits[39], version)) == commits[version].sha256

    def test_proof_finds_a_forged_commit(self) -> None:
        commits = chain_of(100)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 35))  # 99 - 64
        for version in (3, 34, 35):
            with pytest.raises(BrokenChain, match="its hash is not the one that later commits name"):
                run(bucket.chain.prove(commits[99], version))

    def test_proof_finds_a_replaced_history(self) -> None:
        commits = chain_of(50)
        other = chain_of(20)
        other[9] = forged(commits, 9)
        for version in range(10, 20):
            del other[version:]
            grow(other)
        bucket = ChainBucket(commits)
        assert run(bucket.chain.prove(commits[49], 19)) != other[19].sha256
        assert run(bucket.chain.prove(commits[49], 8)) == other[8].sha256


class TestKeysWithoutPermission:
    def bucket(self, commits: Commits) -> ChainBucket:
        bucket = ChainBucket(commits)
        bucket.deny_missing()
        return bucket

    def test_key_without_list_permission_finds_the_head(self) -> None:
        assert run(self.bucket(chain_of(37)).chain.find_head()) == 36

    def test_key_without_list_permission_reads_new_commits(self) -> None:
        commits = chain_of(7)
        assert run(self.bucket(commits).chain.read_after(commits[3])) == commits[4:]
        assert run(self.bucket(commits).chain.read_after(commits[6])) == []

    def test_a_key_without_read_permission_is_an_error(self) -> None:
        bucket = ChainBucket(chain_of(3))
        bucket.trouble("get find list", "", denied, times=1e9)
        for request in (bucket.chain.find_head(), bucket.chain.read(3), bucket.chain.read_after(None)):
            self.assert_denied(request)

    def assert_denied(self, request: Coroutine[Any, Any, object]) -> None:
        with pytest.raises(PermissionDenied):
            run(request)


def test_head_is_found_in_a_directory(tmp_path: Any) -> None:
    commits = chain_of(12)
    bucket = open_bucket(tmp_path)
    run(store(bucket, commits, [(shortcut_path(seal(shortcut_to(commits[9]))), seal(shortcut_to(commits[9])).data)]))
    chain = ChainReader(bucket, run(read_run(bucket)))
    assert run(chain.find_head()) == 11


class TestHeartbeats:
    def beat(self, name: str, run_id: str = RUN_ID) -> Heartbeat:
        return Heartbeat(run=run_id, name=name, version=3, head=4, lease=60.0)

    def test_heartbeat_is_read_at_its_path(self) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("a"): seal(self.beat("a")).data})
        assert run(bucket.chain.read_heartbeat(heartbeat_path("a"))) == self.beat("a")

    def test_a_heartbeat_copied_to_another_name_is_none(self) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("b"): seal(self.beat("a")).data})
        assert run(bucket.chain.read_heartbeat(heartbeat_path("b"))) is None

    @pytest.mark.parametrize("data", [b"{}", b"no JSON", b'{"format": "weightwire/2"}'])
    def test_an_invalid_heartbeat_is_none(self, data: bytes) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("b"): data})
        assert [run(bucket.chain.read_heartbeat(heartbeat_path(name))) for name in "ab"] == [None, None]

    def test_a_heartbeat_of_another_run_is_none(self) -> None:
        bucket = ChainBucket(chain_of(3), **{heartbeat_path("a"): seal(self.beat("a", token("other"))).data})
        assert run(bucket.chain.read_heartbeat(heartbeat_path("a"))) is None
