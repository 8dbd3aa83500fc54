"""Plans: the cheapest way to a version, proven, and never over what is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chains import ChainBucket, Commits, forged, versions
from support.failing_bucket import failed
from support.records import chain_of, grow, sha, shortcut_to, store, token
from weightwire.bucket.registry import open_bucket
from weightwire.catchup.plan import ChainPath, NoWay, find_anchors, plan, plan_newest
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.records import commit_path, seal, shortcut_path
from weightwire.errors import BrokenChain, DataGone, Unavailable

run = asyncio.run


class TestPlan:
    """Deltas of 100 bytes, and an anchor of 1000 at version 1."""

    def plan(self, bucket: ChainBucket, commits: Commits, at: int | None = None, **given: Any) -> ChainPath:
        return run(plan(bucket.chain, commits[-1], None if at is None else commits[at], **given))

    def test_from_nothing_with_the_anchor_in_the_chain(self) -> None:
        commits = chain_of(5)
        path = self.plan(ChainBucket(commits), commits)
        assert (path.start, path.origin) == (commits[1].record, commits[1])
        assert path.commits == tuple(commits[2:])
        assert path.target == commits[4]
        assert path.nbytes == 1300

    def test_from_nothing_with_a_base(self) -> None:
        commits = chain_of(5, first="base")
        path = self.plan(ChainBucket(commits), commits)
        assert path.start == commits[1].record
        assert path.nbytes == 300

    def test_to_the_anchor_itself(self) -> None:
        commits = chain_of(2)
        path = self.plan(ChainBucket(commits), commits)
        assert (path.start, path.commits, path.target) == (commits[1].record, (), commits[1])

    def test_from_an_anchor_beside_the_chain(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in (10, 30, 20):
            bucket.add(shortcut_to(commits[version]))
        path = self.plan(bucket, commits)
        assert (path.start, path.origin) == (shortcut_to(commits[30]), commits[30])
        assert versions(path.commits) == list(range(31, 40))
        assert path.nbytes == 1900

    def test_from_an_anchor_of_the_version_itself(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[39]))
        path = self.plan(bucket, commits)
        assert (path.origin, path.commits, path.target) == (commits[39], (), commits[39])

    def test_going_on_is_cheaper(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        path = self.plan(bucket, commits, at=30)
        assert (path.start, path.origin) == (None, commits[30])
        assert versions(path.commits) == list(range(31, 40))

    def test_an_anchor_is_cheaper_than_going_on(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        assert self.plan(bucket, commits, at=20).origin == commits[37]

    def test_going_on_where_there_is_no_anchor(self) -> None:
        commits = chain_of(40, first="base")
        path = self.plan(ChainBucket(commits), commits, at=2)
        assert path.start is None
        assert versions(path.commits) == list(range(3, 40))

    def test_nothing_to_do(self) -> None:
        commits = chain_of(5)
        path = self.plan(ChainBucket(commits), commits, at=4)
        assert (path.start, path.commits, path.target) == (None, (), commits[4])

    def test_what_is_held_is_of_another_history(self) -> None:
        commits = chain_of(5)
        with pytest.raises(BrokenChain, match="another version 3 than the one held here"):
            run(plan(ChainBucket(commits).chain, commits[4], forged(commits, 3)))

    def test_a_delta_is_lost(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        lost = {commits[33].record.files[0].path}
        assert self.plan(bucket, commits, at=32, lost=lost).origin == commits[37]

    def test_an_anchor_is_lost(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in (20, 37):
            bucket.add(shortcut_to(commits[version]))
        lost = {shortcut_to(commits[37]).files[0].path}
        assert self.plan(bucket, commits, lost=lost).origin == commits[20]

    def test_a_delta_after_the_only_anchor_is_lost(self) -> None:
        commits = chain_of(5)
        with pytest.raises(DataGone, match="no anchor leads to version 4"):
            self.plan(ChainBucket(commits), commits, lost={commits[3].record.files[0].path})

    def test_the_only_anchor_is_lost(self) -> None:
        commits = chain_of(5)
        with pytest.raises(DataGone, match="no anchor leads to version 4"):
            self.plan(ChainBucket(commits), commits, lost={commits[1].record.files[0].path})

    def test_a_run_without_weights(self) -> None:
        commits = chain_of(1)
        grow(commits, "fence")
        with pytest.raises(DataGone):
            self.plan(ChainBucket(commits), commits)

    def test_over_fences_and_versions_that_changed_nothing(self) -> None:
        commits = chain_of(3)
        grow(commits, "fence")
        grow(commits, "delta", files=(), after=commits[-1].record.after)
        grow(commits)
        path = self.plan(ChainBucket(commits), commits, at=2)
        assert versions(path.commits) == [3, 4, 5]
        assert path.nbytes == 100

    def test_an_anchor_in_the_chain_ends_the_way_back(self) -> None:
        commits = chain_of(10)
        grow(commits, "anchor", size=500)
        grow(commits)
        assert self.plan(ChainBucket(commits), commits).origin == commits[10]

    def test_reads_only_what_it_needs(self) -> None:
        commits = chain_of(400)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[390]))
        self.plan(bucket, commits)
        assert bucket.count("get", "commits/") <= 32

    def test_a_commit_on_the_way_that_was_tampered_with(self) -> None:
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 6))
        with pytest.raises(BrokenChain, match=r"commits/0{19}6.json"):
            self.plan(bucket, commits)

    def test_a_broken_commit_that_is_not_on_the_way(self) -> None:
        """Commits are read ahead; what they are worth matters only if they are needed."""
        commits = chain_of(30)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[28], size=50))
        bucket.put_now(commit_path(20), b"rotten")
        assert self.plan(bucket, commits).origin == commits[28]


class TestTheNewestThatCanBeReached:
    """Version 1 is an anchor; all others but those that are named are deltas."""

    def plan(self, bucket: ChainBucket, commits: Commits, lost: set[str], at: int | None = None) -> ChainPath:
        return run(plan_newest(bucket.chain, commits[-1], None if at is None else commits[at], lost))

    def lost(self, commits: Commits, *versions: int) -> set[str]:
        return {commits[version].record.files[0].path for version in versions}

    def test_is_the_newest_where_nothing_is_lost(self) -> None:
        commits = chain_of(9)
        assert self.plan(ChainBucket(commits), commits, set()).target == commits[8]

    def test_is_the_one_before_a_lost_delta(self) -> None:
        commits = chain_of(9)
        path = self.plan(ChainBucket(commits), commits, self.lost(commits, 6))
        assert (path.start, path.target) == (commits[1].record, commits[5])

    def test_is_the_one_before_the_first_of_several_that_are_lost(self) -> None:
        commits = chain_of(9)
        assert self.plan(ChainBucket(commits), commits, self.lost(commits, 4, 6, 7)).target == commits[3]

    def test_is_reached_from_an_anchor_between_what_is_lost(self) -> None:
        commits = chain_of(9)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[5]))
        path = self.plan(bucket, commits, self.lost(commits, 4, 7))
        assert (path.start, path.target) == (shortcut_to(commits[5]), commits[6])

    def test_may_be_far_before_more_anchors_than_are_looked_at(self) -> None:
        """All of the newest anchors are lost with the deltas beside them."""
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        lost = self.lost(commits, *range(20, 40))
        for version in (15, *range(20, 40)):
            shortcut = shortcut_to(commits[version])
            bucket.add(shortcut)
            lost |= {file.path for file in shortcut.files} if version >= 20 else set()
        path = self.plan(bucket, commits, lost)
        assert (path.start, path.target) == (shortcut_to(commits[15]), commits[19])

    def test_is_before_an_anchor_in_the_chain_that_is_lost(self) -> None:
        commits = chain_of(5)
        grow(commits, "anchor")
        grow(commits)
        assert self.plan(ChainBucket(commits), commits, self.lost(commits, 5)).target == commits[4]

    def test_is_reached_from_the_version_held(self) -> None:
        commits = chain_of(9)
        path = self.plan(ChainBucket(commits), commits, self.lost(commits, 1, 7), at=3)
        assert (path.start, path.origin, path.target) == (None, commits[3], commits[6])

    def test_is_never_before_the_version_held(self) -> None:
        commits = chain_of(9)
        path = self.plan(ChainBucket(commits), commits, self.lost(commits, 3, 6), at=5)
        assert (path.start, path.target, path.commits) == (None, commits[5], ())

    def test_is_none_where_the_first_anchor_is_lost(self) -> None:
        commits = chain_of(9)
        lost = self.lost(commits, 1)
        with pytest.raises(NoWay, match="no anchor leads to version 8") as caught:
            self.plan(ChainBucket(commits), commits, lost)
        assert {caught.value.blocked_by} == lost

    def test_what_blocks_the_way_is_named(self) -> None:
        commits = chain_of(9)
        lost = self.lost(commits, 6)
        with pytest.raises(NoWay) as caught:
            run(plan(ChainBucket(commits).chain, commits[8], lost=lost))
        assert {caught.value.blocked_by} == lost


class TestShortcuts:
    def test_are_found_by_version(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in (5, 30, 9):
            bucket.add(shortcut_to(commits[version]))
        assert run(find_anchors(bucket.chain, 20)) == {5: shortcut_to(commits[5]), 9: shortcut_to(commits[9])}

    def test_that_end_in_another_state_are_no_way(self) -> None:
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[8], after=sha("something else")))
        assert run(plan(bucket.chain, commits[9])).origin == commits[1]

    def test_beyond_the_target_are_no_way(self) -> None:
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[9]))
        assert run(plan(bucket.chain, commits[8])).origin == commits[1]

    def test_that_cannot_be_read_are_no_reason_to_stop(self) -> None:
        """Anyone who may write may have written them."""
        commits = chain_of(10)
        bucket = ChainBucket(commits)
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
        assert run(find_anchors(bucket.chain, 9)) == {5: shortcut_to(commits[5])}

    def test_that_cannot_be_reached_are_asked_for_again(self) -> None:
        """To go without would mean a long way for nothing."""
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[8]))
        bucket.trouble("get", "shortcuts/", failed)
        with pytest.raises(Unavailable):
            run(plan(bucket.chain, commits[9]))

    def test_only_some_are_read(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in range(1, 40):
            bucket.add(shortcut_to(commits[version]))
        assert sorted(run(find_anchors(bucket.chain, 39))) == list(range(36, 40))
        assert bucket.count("get") == 4


class TestAKeyWithoutListPermission:
    def bucket(self, commits: Commits) -> ChainBucket:
        bucket = ChainBucket(commits)
        bucket.deny_missing()
        return bucket

    def test_finds_the_anchor_of_the_hint(self) -> None:
        commits = chain_of(30)
        bucket = self.bucket(commits)
        bucket.add(shortcut_to(commits[25]))
        bucket.hint(29, shortcut_path(seal(shortcut_to(commits[25]))))
        assert run(plan(bucket.chain, commits[29])).start == shortcut_to(commits[25])

    @pytest.mark.parametrize(
        "anchor",
        ["", "shortcuts/25/anchor-0123456789abcdef.json", "shortcuts/25/..", "shortcuts/25/", "../25/x", "run.json"],
    )
    def test_finds_a_way_without_one(self, anchor: str) -> None:
        """The hint is never trusted."""
        commits = chain_of(30)
        bucket = self.bucket(commits)
        bucket.hint(29, anchor)
        assert run(plan(bucket.chain, commits[29])).origin == commits[1]


def test_in_a_directory_too(tmp_path: Any) -> None:
    commits = chain_of(12)
    bucket = open_bucket(tmp_path)
    run(store(bucket, commits, [(shortcut_path(seal(shortcut_to(commits[9]))), seal(shortcut_to(commits[9])).data)]))
    chain = ChainReader(bucket, run(read_run(bucket)))
    assert run(plan(chain, commits[11])).origin == commits[9]
