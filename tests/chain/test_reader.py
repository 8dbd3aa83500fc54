"""The chain in a bucket: the newest is found by few requests, the oldest proven by few, and no way leads astray."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from support.records import a_run, chain_of, grow, sha, shortcut_to, store, token
from support.troubled import Act, Troubled, denied, failed, in_memory
from weightwire.bucket.registry import open_bucket
from weightwire.chain.reader import ChainReader, Path, read_run
from weightwire.chain.records import HEAD, RUN, Commit, Head, Sealed, Shortcut, commit_path, seal, shortcut_path
from weightwire.errors import (
    BrokenChain,
    DataGone,
    ForeignRun,
    NoRun,
    NotFound,
    PermissionDenied,
    Unavailable,
    UnsupportedFormat,
)

Result = TypeVar("Result")
Commits = list[Sealed[Commit]]

run = asyncio.run


class Bucket(Troubled):
    """A run in memory, with a chain to read it."""

    def __init__(self, commits: Sequence[Sealed[Commit]], **objects: bytes) -> None:
        super().__init__(in_memory().inner)
        self.chain = ChainReader(self, a_run())
        asyncio.run(store(self.inner, commits, ((path.replace("__", "/"), data) for path, data in objects.items())))

    def put_now(self, path: str, data: bytes) -> None:
        asyncio.run(self.inner.put(path, data))

    def add(self, shortcut: Shortcut) -> None:
        self.put_now(shortcut_path(seal(shortcut)), seal(shortcut).data)

    def hint(self, version: int, anchor: str = "", run: str = a_run().run) -> None:
        self.put_now(HEAD, seal(Head(run=run, version=version, anchor=anchor)).data)

    def rewrite(self, commit: Sealed[Commit]) -> None:
        """Another commit in the place of one."""
        self.put_now(commit_path(commit.record.version), commit.data)


def forged(commits: Commits, version: int) -> Sealed[Commit]:
    """A commit that is fine for itself, but not the one that others were built on."""
    return grow(commits[:version], commits[version].record.kind, write_id=token("forger"))


def versions(commits: Sequence[Sealed[Commit]]) -> list[int]:
    return [commit.record.version for commit in commits]


class TestTheRun:
    def test_is_read(self) -> None:
        assert run(read_run(Bucket([]))) == a_run()

    def test_is_not_there_yet(self) -> None:
        with pytest.raises(NoRun, match="nothing has been published there yet"):
            run(read_run(in_memory()))

    def test_is_of_a_later_protocol(self) -> None:
        with pytest.raises(UnsupportedFormat, match=r"memory://.*/run.json"):
            run(read_run(Bucket([], **{RUN: b'{"format": "weightwire/2"}'})))

    def test_cannot_be_reached(self) -> None:
        bucket = Bucket([])
        bucket.trouble("get", RUN, failed)
        with pytest.raises(Unavailable):
            run(read_run(bucket))


class TestOneCommit:
    def test_is_read_as_it_lies_there(self) -> None:
        commits = chain_of(3)
        assert run(Bucket(commits).chain.read(2)) == commits[2]

    def test_is_none_where_there_is_none(self) -> None:
        assert run(Bucket(chain_of(3)).chain.read(3)) is None

    def test_says_another_number(self) -> None:
        bucket = Bucket(chain_of(3))
        bucket.put_now(commit_path(3), chain_of(3)[2].data)
        with pytest.raises(BrokenChain, match=r"memory://.*/commits/0{19}3.json: says it is version 2"):
            run(bucket.chain.read(3))

    def test_is_of_another_run(self) -> None:
        commits: Commits = []
        grow(commits, "fence", run=token("other"))
        with pytest.raises(ForeignRun):
            run(Bucket(commits).chain.read(0))

    def test_the_first_is_the_beginning(self) -> None:
        commits: Commits = []
        grow(commits, "fence", parent=sha("something before it"))
        with pytest.raises(BrokenChain, match="no beginning"):
            run(Bucket(commits).chain.read(0))

    def test_what_cannot_be_reached_is_not_taken_for_absent(self) -> None:
        bucket = Bucket(chain_of(3))
        bucket.trouble("get", "commits/", failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.read(3))


class TestALinkedCommit:
    def test_is_the_one_that_later_ones_name(self) -> None:
        commits = chain_of(3)
        bucket = Bucket(commits)
        assert run(bucket.chain.read_linked(1, commits[1].sha256)) == commits[1]

    def test_is_another(self) -> None:
        commits = chain_of(3)
        bucket = Bucket(commits)
        bucket.rewrite(forged(commits, 1))
        with pytest.raises(BrokenChain, match="not the commit that later ones were built on"):
            run(bucket.chain.read_linked(1, commits[1].sha256))

    def test_is_missing(self) -> None:
        with pytest.raises(BrokenChain, match="is missing, though later versions are there"):
            run(Bucket([]).chain.read_linked(1, sha("x")))

    def test_is_read_once(self) -> None:
        commits = chain_of(3)
        bucket = Bucket(commits)
        for _ in range(3):
            run(bucket.chain.read_linked(1, commits[1].sha256))
        assert bucket.count("get") == 1

    def test_what_is_remembered_is_not_taken_for_another(self) -> None:
        commits = chain_of(3)
        bucket = Bucket(commits)
        bucket.chain.remember(forged(commits, 1))
        assert run(bucket.chain.read_linked(1, commits[1].sha256)) == commits[1]


class TestTheNewest:
    @pytest.mark.parametrize("count", [*range(10), 31, 32, 33, 100])
    def test_is_found_without_a_hint(self, count: int) -> None:
        bucket = Bucket(chain_of(count))
        assert run(bucket.chain.find_head()) == count - 1
        newest = run(bucket.chain.read_head())
        assert newest == (chain_of(count)[-1] if count else None)

    @pytest.mark.parametrize("known", [-1, 0, 1, 5, 6, 36])
    @pytest.mark.parametrize("hint", [0, 5, 36, 37, 1000, 2**53 - 1])
    def test_is_found_whatever_the_hint(self, known: int, hint: int) -> None:
        bucket = Bucket(chain_of(37))
        bucket.hint(hint)
        assert run(bucket.chain.find_head(known)) == 36

    @pytest.mark.parametrize(
        "hint", [b"", b"{}", b"\xff", b'{"format":"weightwire/9"}', seal(Head(run=token("x"), version=3)).data]
    )
    def test_is_found_with_a_hint_that_is_worth_nothing(self, hint: bytes) -> None:
        bucket = Bucket(chain_of(12), **{HEAD: hint})
        assert run(bucket.chain.read_hint()) is None
        assert run(bucket.chain.find_head()) == 11

    def test_is_found_where_the_hint_cannot_be_reached(self) -> None:
        bucket = Bucket(chain_of(12))
        bucket.trouble("get", HEAD, failed)
        assert run(bucket.chain.find_head()) == 11

    def test_is_not_guessed_where_the_bucket_cannot_be_reached(self) -> None:
        bucket = Bucket(chain_of(12))
        bucket.trouble("find", commit_path(10), failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.find_head())

    def test_takes_three_requests_with_a_good_hint(self) -> None:
        bucket = Bucket(chain_of(300))
        bucket.hint(299)
        assert run(bucket.chain.find_head()) == 299
        assert len(bucket.asked) == 3

    @pytest.mark.parametrize("hint", [None, 0, 100, 10**9])
    def test_takes_few_requests_with_none(self, hint: int | None) -> None:
        bucket = Bucket(chain_of(300))
        if hint is not None:
            bucket.hint(hint)
        assert run(bucket.chain.find_head()) == 299
        assert len(bucket.asked) <= 2 + 2 * 9

    def test_takes_two_requests_where_nothing_is_new(self) -> None:
        bucket = Bucket(chain_of(300))
        assert run(bucket.chain.find_head(299)) == 299
        assert len(bucket.asked) == 2


class TestWhatIsNew:
    def test_from_the_beginning(self) -> None:
        commits = chain_of(5)
        assert run(Bucket(commits).chain.read_after(None)) == commits

    def test_after_one(self) -> None:
        commits = chain_of(5)
        assert run(Bucket(commits).chain.read_after(commits[2])) == commits[3:]

    def test_nothing(self) -> None:
        """404 is the common answer, so it takes one request."""
        bucket = Bucket(chain_of(5))
        assert run(bucket.chain.read_after(chain_of(5)[4])) == []
        assert bucket.asked == [("get", commit_path(5))]

    @pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
    def test_not_more_than_asked_for(self, most: int) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        assert run(bucket.chain.read_after(commits[3], most)) == commits[4 : 4 + most]
        assert bucket.count("get") == most

    def test_all_of_it_in_turn(self) -> None:
        commits = chain_of(100)
        bucket = Bucket(commits)
        found: Commits = []
        while more := run(bucket.chain.read_after(found[-1] if found else None)):
            found += more
        assert found == commits

    def test_one_that_does_not_follow(self) -> None:
        commits = chain_of(5)
        bucket = Bucket(commits)
        bucket.rewrite(grow(commits[:4], epoch=2, kind="delta"))
        with pytest.raises(BrokenChain, match=r"commits/0{19}4.json: a new publisher must begin with a fence"):
            run(bucket.chain.read_after(commits[3]))

    def test_what_comes_before_one_that_does_not_follow(self) -> None:
        commits = chain_of(8)
        bucket = Bucket(commits)
        bucket.rewrite(forged(commits, 5))  # which follows from 4, but 6 does not follow from it
        accepted = run(bucket.chain.read_after(commits[2]))
        assert versions(accepted) == [3, 4, 5]
        with pytest.raises(BrokenChain, match="its parent hash is another"):
            run(bucket.chain.read_after(accepted[-1]))

    @pytest.mark.parametrize("rotten", [4, 5, 6, 7])
    def test_what_comes_before_one_that_cannot_be_read(self, rotten: int) -> None:
        commits = chain_of(8)
        bucket = Bucket(commits)
        bucket.put_now(commit_path(rotten), b"rotten")
        assert versions(run(bucket.chain.read_after(commits[2]))) == list(range(3, rotten))
        with pytest.raises(BrokenChain, match=f"{rotten}.json: cannot be read"):
            run(bucket.chain.read_after(commits[rotten - 1]))


class TestBack:
    def test_the_next_commit_names_the_true_hashes(self) -> None:
        commits = chain_of(71)
        chain = Bucket(commits).chain
        for version in range(1, 71):
            assert run(chain.back_of(commits[version - 1])) == commits[version].record.back

    def test_takes_few_requests(self) -> None:
        commits = chain_of(300)
        bucket = Bucket(commits)
        grow(commits)
        assert run(bucket.chain.back_of(commits[299])) == commits[300].record.back
        assert bucket.count("get") <= 8

    def test_takes_none_once_it_is_known(self) -> None:
        commits = chain_of(64)
        bucket = Bucket(commits)
        run(bucket.chain.back_of(commits[63]))
        bucket.asked.clear()
        run(bucket.chain.back_of(commits[63]))
        assert not bucket.asked

    def test_a_commit_that_was_tampered_with(self) -> None:
        commits = chain_of(64)
        bucket = Bucket(commits)
        bucket.rewrite(forged(commits, 60))
        with pytest.raises(BrokenChain, match=r"commits/0{18}60.json"):
            run(bucket.chain.back_of(commits[63]))


@pytest.fixture(scope="module")
def long() -> tuple[Bucket, Commits]:
    commits = chain_of(2000)
    return Bucket(commits), commits


class TestProof:
    @pytest.mark.parametrize("version", [0, 1, 2, 777, 1023, 1024, 1998, 1999])
    def test_of_any_earlier_version(self, long: tuple[Bucket, Commits], version: int) -> None:
        bucket, commits = long
        bucket.asked.clear()
        chain = ChainReader(bucket, a_run())
        assert run(chain.prove(commits[-1], version)) == commits[version].sha256
        assert len(bucket.asked) <= 11

    def test_of_every_version_of_a_short_chain(self) -> None:
        commits = chain_of(40)
        chain = Bucket(commits).chain
        for version in range(40):
            assert run(chain.prove(commits[39], version)) == commits[version].sha256

    def test_finds_one_that_was_tampered_with(self) -> None:
        commits = chain_of(100)
        bucket = Bucket(commits)
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
        bucket = Bucket(commits)
        assert run(bucket.chain.prove(commits[49], 19)) != other[19].sha256
        assert run(bucket.chain.prove(commits[49], 8)) == other[8].sha256


class TestPlan:
    """Deltas of 100 bytes, and an anchor of 1000 at version 1."""

    def plan(self, bucket: Bucket, commits: Commits, at: int | None = None, **given: Any) -> Path:
        return run(bucket.chain.plan(commits[-1], None if at is None else commits[at], **given))

    def test_from_nothing_with_the_anchor_in_the_chain(self) -> None:
        commits = chain_of(5)
        path = self.plan(Bucket(commits), commits)
        assert (path.start, path.origin) == (commits[1].record, commits[1])
        assert path.commits == tuple(commits[2:])
        assert path.target == commits[4]
        assert path.nbytes == 1300

    def test_from_nothing_with_a_base(self) -> None:
        commits = chain_of(5, first="base")
        path = self.plan(Bucket(commits), commits)
        assert path.start == commits[1].record
        assert path.nbytes == 300

    def test_to_the_anchor_itself(self) -> None:
        commits = chain_of(2)
        path = self.plan(Bucket(commits), commits)
        assert (path.start, path.commits, path.target) == (commits[1].record, (), commits[1])

    def test_from_an_anchor_beside_the_chain(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        for version in (10, 30, 20):
            bucket.add(shortcut_to(commits[version]))
        path = self.plan(bucket, commits)
        assert (path.start, path.origin) == (shortcut_to(commits[30]), commits[30])
        assert versions(path.commits) == list(range(31, 40))
        assert path.nbytes == 1900

    def test_from_an_anchor_of_the_version_itself(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[39]))
        path = self.plan(bucket, commits)
        assert (path.origin, path.commits, path.target) == (commits[39], (), commits[39])

    def test_going_on_is_cheaper(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[37]))
        path = self.plan(bucket, commits, at=30)
        assert (path.start, path.origin) == (None, commits[30])
        assert versions(path.commits) == list(range(31, 40))

    def test_an_anchor_is_cheaper_than_going_on(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[37]))
        assert self.plan(bucket, commits, at=20).origin == commits[37]

    def test_going_on_where_there_is_no_anchor(self) -> None:
        commits = chain_of(40, first="base")
        path = self.plan(Bucket(commits), commits, at=2)
        assert path.start is None
        assert versions(path.commits) == list(range(3, 40))

    def test_nothing_to_do(self) -> None:
        commits = chain_of(5)
        path = self.plan(Bucket(commits), commits, at=4)
        assert (path.start, path.commits, path.target) == (None, (), commits[4])

    def test_what_is_held_is_of_another_history(self) -> None:
        commits = chain_of(5)
        with pytest.raises(BrokenChain, match="another version 3 than the one held here"):
            run(Bucket(commits).chain.plan(commits[4], forged(commits, 3)))

    def test_a_delta_is_lost(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[37]))
        lost = {commits[33].record.files[0].path}
        assert self.plan(bucket, commits, at=32, lost=lost).origin == commits[37]

    def test_an_anchor_is_lost(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        for version in (20, 37):
            bucket.add(shortcut_to(commits[version]))
        lost = {shortcut_to(commits[37]).files[0].path}
        assert self.plan(bucket, commits, lost=lost).origin == commits[20]

    def test_a_delta_after_the_only_anchor_is_lost(self) -> None:
        commits = chain_of(5)
        with pytest.raises(DataGone, match="no anchor leads to version 4"):
            self.plan(Bucket(commits), commits, lost={commits[3].record.files[0].path})

    def test_the_only_anchor_is_lost(self) -> None:
        commits = chain_of(5)
        with pytest.raises(DataGone, match="no anchor leads to version 4"):
            self.plan(Bucket(commits), commits, lost={commits[1].record.files[0].path})

    def test_a_run_without_weights(self) -> None:
        commits = chain_of(1)
        grow(commits, "fence")
        with pytest.raises(DataGone):
            self.plan(Bucket(commits), commits)

    def test_over_fences_and_versions_that_changed_nothing(self) -> None:
        commits = chain_of(3)
        grow(commits, "fence")
        grow(commits, "delta", files=(), after=commits[-1].record.after)
        grow(commits)
        path = self.plan(Bucket(commits), commits, at=2)
        assert versions(path.commits) == [3, 4, 5]
        assert path.nbytes == 100

    def test_an_anchor_in_the_chain_ends_the_way_back(self) -> None:
        commits = chain_of(10)
        grow(commits, "anchor", size=500)
        grow(commits)
        assert self.plan(Bucket(commits), commits).origin == commits[10]

    def test_reads_only_what_it_needs(self) -> None:
        commits = chain_of(400)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[390]))
        self.plan(bucket, commits)
        assert bucket.count("get", "commits/") <= 32

    def test_a_commit_on_the_way_that_was_tampered_with(self) -> None:
        commits = chain_of(10)
        bucket = Bucket(commits)
        bucket.rewrite(forged(commits, 6))
        with pytest.raises(BrokenChain, match=r"commits/0{19}6.json"):
            self.plan(bucket, commits)

    def test_a_broken_commit_that_is_not_on_the_way(self) -> None:
        """Commits are read ahead; what they are worth matters only if they are needed."""
        commits = chain_of(30)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[28], size=50))
        bucket.put_now(commit_path(20), b"rotten")
        assert self.plan(bucket, commits).origin == commits[28]


class TestShortcuts:
    def test_are_found_by_version(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        for version in (5, 30, 9):
            bucket.add(shortcut_to(commits[version]))
        assert run(bucket.chain.anchors(20)) == {5: shortcut_to(commits[5]), 9: shortcut_to(commits[9])}

    def test_that_end_in_another_state_are_no_way(self) -> None:
        commits = chain_of(10)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[8], after=sha("something else")))
        assert run(bucket.chain.plan(commits[9], None)).origin == commits[1]

    def test_beyond_the_target_are_no_way(self) -> None:
        commits = chain_of(10)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[9]))
        assert run(bucket.chain.plan(commits[8], None)).origin == commits[1]

    def test_that_cannot_be_read_are_no_reason_to_stop(self) -> None:
        """Anyone who may write may have written them."""
        commits = chain_of(10)
        bucket = Bucket(commits)
        foreign = shortcut_to(commits[9], run=token("other"))
        bucket.add(foreign)
        for path in (
            "8/anchor-0123456789abcdef.json",
            "x/y.json",
            "y.json",
            "7/z/anchor.json",
            "6/\u00b2.json",
            "\u0663/x",
        ):
            bucket.put_now(f"shortcuts/{path}", b"?")
        misplaced = shortcut_to(commits[4])
        bucket.put_now(shortcut_path(seal(misplaced)).replace("shortcuts/4", "shortcuts/7"), seal(misplaced).data)
        bucket.add(shortcut_to(commits[5]))
        assert run(bucket.chain.anchors(9)) == {5: shortcut_to(commits[5])}

    def test_that_cannot_be_reached_are_asked_for_again(self) -> None:
        """To go without would mean a long way for nothing."""
        commits = chain_of(10)
        bucket = Bucket(commits)
        bucket.add(shortcut_to(commits[8]))
        bucket.trouble("get", "shortcuts/", failed)
        with pytest.raises(Unavailable):
            run(bucket.chain.plan(commits[9], None))

    def test_only_some_are_read(self) -> None:
        commits = chain_of(40)
        bucket = Bucket(commits)
        for version in range(1, 40):
            bucket.add(shortcut_to(commits[version]))
        assert sorted(run(bucket.chain.anchors(39))) == list(range(36, 40))
        assert bucket.count("get") == 4


async def as_s3_says(act: Act) -> Any:
    """To a key that may not list, S3 answers the same for what is missing as for what is forbidden."""
    try:
        found = await act()
    except NotFound as problem:
        raise PermissionDenied("Access Denied") from problem
    if found is None:
        raise PermissionDenied("Access Denied")
    return found


class TestAKeyThatMayNotList:
    def bucket(self, commits: Commits) -> Bucket:
        bucket = Bucket(commits)
        bucket.trouble("list", "", denied, times=1e9)
        bucket.trouble("get find", "", as_s3_says, times=1e9)
        return bucket

    def test_finds_the_newest(self) -> None:
        assert run(self.bucket(chain_of(37)).chain.find_head()) == 36

    def test_finds_what_is_new(self) -> None:
        commits = chain_of(7)
        assert run(self.bucket(commits).chain.read_after(commits[3])) == commits[4:]
        assert run(self.bucket(commits).chain.read_after(commits[6])) == []

    def test_finds_the_anchor_of_the_hint(self) -> None:
        commits = chain_of(30)
        bucket = self.bucket(commits)
        bucket.add(shortcut_to(commits[25]))
        bucket.hint(29, shortcut_path(seal(shortcut_to(commits[25]))))
        assert run(bucket.chain.plan(commits[29], None)).start == shortcut_to(commits[25])

    @pytest.mark.parametrize(
        "anchor",
        ["", "shortcuts/25/anchor-0123456789abcdef.json", "shortcuts/25/..", "shortcuts/25/", "../25/x", "run.json"],
    )
    def test_finds_a_way_without_one(self, anchor: str) -> None:
        """The hint is never trusted."""
        commits = chain_of(30)
        bucket = self.bucket(commits)
        bucket.hint(29, anchor)
        assert run(bucket.chain.plan(commits[29], None)).origin == commits[1]

    def test_one_that_may_not_even_read_is_told_so(self) -> None:
        bucket = Bucket(chain_of(3))
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
    assert run(chain.plan(commits[11], None)).origin == commits[9]
