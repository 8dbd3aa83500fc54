"""Plans: the cheapest path to a version, proven, and never over lost data."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chains import ChainBucket, Commits, forged, versions
from support.failing_bucket import Act, failed
from support.records import chain_of, grow, sha, shortcut_to, store, token
from weightwire.bucket.registry import open_bucket
from weightwire.catchup.plan import ChainPath, NoPath, find_anchors, plan, plan_newest
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import seal, shortcut_path
from weightwire.errors import BrokenChain, DataGone, Unavailable

run = asyncio.run


class TestPlan:
    """Deltas have 100 bytes. Version 1 is an anchor of 1000 bytes."""

    def plan(self, bucket: ChainBucket, commits: Commits, at: int | None = None, **given: Any) -> ChainPath:
        return run(plan(bucket.chain, commits[-1], None if at is None else commits[at], **given))

    def test_plan_starts_from_an_anchor_in_the_chain(self) -> None:
        commits = chain_of(5)
        path = self.plan(ChainBucket(commits), commits)
        assert (path.start, path.origin) == (commits[1].record, commits[1])
        assert path.commits == tuple(commits[2:])
        assert path.target == commits[4]
        assert path.nbytes == 1300

    def test_plan_starts_from_a_base(self) -> None:
        commits = chain_of(5, first="base")
        path = self.plan(ChainBucket(commits), commits)
        assert path.start == commits[1].record
        assert path.nbytes == 300

    def test_plan_may_end_at_the_anchor_itself(self) -> None:
        commits = chain_of(2)
        path = self.plan(ChainBucket(commits), commits)
        assert (path.start, path.commits, path.target) == (commits[1].record, (), commits[1])

    def test_plan_starts_from_an_anchor_beside_the_chain(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in (10, 30, 20):
            bucket.add(shortcut_to(commits[version]))
        path = self.plan(bucket, commits)
        assert (path.start, path.origin) == (shortcut_to(commits[30]), commits[30])
        assert versions(path.commits) == list(range(31, 40))
        assert path.nbytes == 1900

    def test_plan_starts_from_an_anchor_of_the_target(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[39]))
        path = self.plan(bucket, commits)
        assert (path.origin, path.commits, path.target) == (commits[39], (), commits[39])

    def test_plan_continues_from_the_version_held_if_that_is_cheaper(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        path = self.plan(bucket, commits, at=30)
        assert (path.start, path.origin) == (None, commits[30])
        assert versions(path.commits) == list(range(31, 40))

    def test_plan_takes_an_anchor_if_that_is_cheaper(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        assert self.plan(bucket, commits, at=20).origin == commits[37]

    def test_plan_continues_from_the_version_held_without_an_anchor(self) -> None:
        commits = chain_of(40, first="base")
        path = self.plan(ChainBucket(commits), commits, at=2)
        assert path.start is None
        assert versions(path.commits) == list(range(3, 40))

    def test_plan_is_empty_at_the_target(self) -> None:
        commits = chain_of(5)
        path = self.plan(ChainBucket(commits), commits, at=4)
        assert (path.start, path.commits, path.target) == (None, (), commits[4])

    def test_a_held_version_of_another_history_is_refused(self) -> None:
        commits = chain_of(5)
        with pytest.raises(BrokenChain, match=r"3\.json: is not the commit that this replica holds"):
            run(plan(ChainBucket(commits).chain, commits[4], forged(commits, 3)))

    def test_plan_avoids_a_lost_delta(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        lost = {commits[33].record.files[0].path}
        assert self.plan(bucket, commits, at=32, lost=lost).origin == commits[37]

    def test_plan_avoids_a_lost_anchor(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in (20, 37):
            bucket.add(shortcut_to(commits[version]))
        lost = {shortcut_to(commits[37]).files[0].path}
        assert self.plan(bucket, commits, lost=lost).origin == commits[20]

    def test_plan_fails_if_a_delta_after_the_only_anchor_is_lost(self) -> None:
        commits = chain_of(5)
        with pytest.raises(DataGone, match="no anchor leads to version 4"):
            self.plan(ChainBucket(commits), commits, lost={commits[3].record.files[0].path})

    def test_plan_fails_if_the_only_anchor_is_lost(self) -> None:
        commits = chain_of(5)
        with pytest.raises(DataGone, match="no anchor leads to version 4"):
            self.plan(ChainBucket(commits), commits, lost={commits[1].record.files[0].path})

    def test_plan_fails_in_a_run_without_weights(self) -> None:
        commits = chain_of(1)
        grow(commits, "fence")
        with pytest.raises(DataGone):
            self.plan(ChainBucket(commits), commits)

    def test_plan_includes_fences_and_unchanged_versions(self) -> None:
        commits = chain_of(3)
        grow(commits, "fence")
        grow(commits, "delta", files=(), after=commits[-1].record.after)
        grow(commits)
        path = self.plan(ChainBucket(commits), commits, at=2)
        assert versions(path.commits) == [3, 4, 5]
        assert path.nbytes == 100

    def test_plan_searches_back_only_to_an_anchor_in_the_chain(self) -> None:
        commits = chain_of(10)
        grow(commits, "anchor", size=500)
        grow(commits)
        assert self.plan(ChainBucket(commits), commits).origin == commits[10]

    def test_plan_reads_only_the_needed_commits(self) -> None:
        commits = chain_of(400)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[390]))
        self.plan(bucket, commits)
        assert bucket.count("get", "commits/") <= 32

    def test_plan_refuses_a_forged_commit_on_the_path(self) -> None:
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.rewrite(forged(commits, 6))
        with pytest.raises(BrokenChain, match=r"commits/0{19}6.json"):
            self.plan(bucket, commits)

    def test_plan_refuses_an_anchor_in_a_chain_with_another_beginning(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[37]))
        bucket.rewrite(forged(commits, 0))
        with pytest.raises(BrokenChain, match=r"0\.json: its hash is not the one that later commits name"):
            self.plan(bucket, commits)

    def test_plan_ignores_a_broken_commit_beside_the_path(self) -> None:
        """Commits are read ahead, but checked only if they are needed."""
        commits = chain_of(30)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[28], size=50))
        bucket.put_now(commit_path(20), b"rotten")
        assert self.plan(bucket, commits).origin == commits[28]


class TestNewestReachableVersion:
    """Version 1 is an anchor. Other versions are deltas unless stated."""

    def plan(self, bucket: ChainBucket, commits: Commits, lost: set[str], at: int | None = None) -> ChainPath:
        return run(plan_newest(bucket.chain, commits[-1], None if at is None else commits[at], lost))

    def lost(self, commits: Commits, *versions: int) -> set[str]:
        return {commits[version].record.files[0].path for version in versions}

    def test_newest_reachable_version_is_the_head_if_nothing_is_lost(self) -> None:
        commits = chain_of(9)
        assert self.plan(ChainBucket(commits), commits, set()).target == commits[8]

    def test_newest_reachable_version_is_before_a_lost_delta(self) -> None:
        commits = chain_of(9)
        path = self.plan(ChainBucket(commits), commits, self.lost(commits, 6))
        assert (path.start, path.target) == (commits[1].record, commits[5])

    def test_newest_reachable_version_is_before_the_first_of_several_lost_deltas(self) -> None:
        commits = chain_of(9)
        assert self.plan(ChainBucket(commits), commits, self.lost(commits, 4, 6, 7)).target == commits[3]

    def test_anchor_between_lost_deltas_reaches_the_newest_reachable_version(self) -> None:
        commits = chain_of(9)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[5]))
        path = self.plan(bucket, commits, self.lost(commits, 4, 7))
        assert (path.start, path.target) == (shortcut_to(commits[5]), commits[6])

    def test_newest_reachable_version_may_be_before_many_lost_anchors(self) -> None:
        """All newer anchors are lost, and so are the deltas beside them."""
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        lost = self.lost(commits, *range(20, 40))
        for version in (15, *range(20, 40)):
            shortcut = shortcut_to(commits[version])
            bucket.add(shortcut)
            lost |= {file.path for file in shortcut.files} if version >= 20 else set()
        path = self.plan(bucket, commits, lost)
        assert (path.start, path.target) == (shortcut_to(commits[15]), commits[19])

    def test_newest_reachable_version_is_before_a_lost_anchor_in_the_chain(self) -> None:
        commits = chain_of(5)
        grow(commits, "anchor")
        grow(commits)
        assert self.plan(ChainBucket(commits), commits, self.lost(commits, 5)).target == commits[4]

    def test_newest_reachable_version_is_reached_from_the_version_held(self) -> None:
        commits = chain_of(9)
        path = self.plan(ChainBucket(commits), commits, self.lost(commits, 1, 7), at=3)
        assert (path.start, path.origin, path.target) == (None, commits[3], commits[6])

    def test_newest_reachable_version_is_never_before_the_version_held(self) -> None:
        commits = chain_of(9)
        path = self.plan(ChainBucket(commits), commits, self.lost(commits, 3, 6), at=5)
        assert (path.start, path.target, path.commits) == (None, commits[5], ())

    def test_no_version_is_reachable_if_the_first_anchor_is_lost(self) -> None:
        commits = chain_of(9)
        lost = self.lost(commits, 1)
        with pytest.raises(NoPath, match="no anchor leads to version 8") as caught:
            self.plan(ChainBucket(commits), commits, lost)
        assert {caught.value.blocked_by} == lost

    def test_the_error_names_the_lost_file(self) -> None:
        commits = chain_of(9)
        lost = self.lost(commits, 6)
        with pytest.raises(NoPath) as caught:
            run(plan(ChainBucket(commits).chain, commits[8], lost=lost))
        assert {caught.value.blocked_by} == lost


class TestShortcuts:
    def test_shortcuts_are_found_by_version(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in (5, 30, 9):
            bucket.add(shortcut_to(commits[version]))
        assert run(find_anchors(bucket.chain, 20)) == {5: shortcut_to(commits[5]), 9: shortcut_to(commits[9])}

    def test_shortcuts_to_another_state_are_not_used(self) -> None:
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[8], after=sha("something else")))
        assert run(plan(bucket.chain, commits[9])).origin == commits[1]

    def test_shortcuts_beyond_the_target_are_not_used(self) -> None:
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[9]))
        assert run(plan(bucket.chain, commits[8])).origin == commits[1]

    def test_malformed_shortcuts_are_skipped(self) -> None:
        """Anyone with write permission may have written them."""
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

    def test_unreachable_shortcuts_fail_the_plan(self) -> None:
        """A plan without them would be a needlessly long path."""
        commits = chain_of(10)
        bucket = ChainBucket(commits)
        bucket.add(shortcut_to(commits[8]))
        bucket.trouble("get", "shortcuts/", failed)
        with pytest.raises(Unavailable):
            run(plan(bucket.chain, commits[9]))

    def test_only_the_newest_shortcuts_are_read(self) -> None:
        commits = chain_of(40)
        bucket = ChainBucket(commits)
        for version in range(1, 40):
            bucket.add(shortcut_to(commits[version]))
        assert sorted(run(find_anchors(bucket.chain, 39))) == list(range(36, 40))
        assert bucket.count("get") == 4


class TestJunkShortcuts:
    """Anyone with write access may add any number of them."""

    def bucket(self, junk: int) -> ChainBucket:
        bucket = ChainBucket(chain_of(40))
        for number in range(junk):
            bucket.put_now(f"shortcuts/39/anchor-{number:016x}.json", b"{}")
        return bucket

    def test_some_junk_hides_no_anchor(self) -> None:
        bucket = self.bucket(100)
        for version in (10, 20, 30):
            bucket.add(shortcut_to(chain_of(40)[version]))
        assert sorted(run(find_anchors(bucket.chain, 39))) == [10, 20, 30]

    def test_the_number_of_requests_is_bounded(self) -> None:
        bucket = self.bucket(1000)
        assert run(find_anchors(bucket.chain, 39)) == {}
        assert bucket.count("get") == 256
        assert run(plan(bucket.chain, chain_of(40)[-1])).start == chain_of(40)[1].record

    def test_junk_is_read_several_at_a_time(self) -> None:
        bucket = self.bucket(200)
        running, most = 0, 0

        async def counted(act: Act) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await act()

        bucket.trouble("get", "shortcuts/", counted, times=1e9)
        run(find_anchors(bucket.chain, 39))
        assert most == 16


class TestKeyWithoutListPermission:
    def bucket(self, commits: Commits) -> ChainBucket:
        bucket = ChainBucket(commits)
        bucket.deny_missing()
        return bucket

    def test_key_without_list_permission_finds_the_anchor_named_by_head_json(self) -> None:
        commits = chain_of(30)
        bucket = self.bucket(commits)
        bucket.add(shortcut_to(commits[25]))
        bucket.hint(29, shortcut_path(seal(shortcut_to(commits[25]))))
        assert run(plan(bucket.chain, commits[29])).start == shortcut_to(commits[25])

    @pytest.mark.parametrize(
        "anchor",
        ["", "shortcuts/25/anchor-0123456789abcdef.json", "shortcuts/25/..", "shortcuts/25/", "../25/x", "run.json"],
    )
    def test_key_without_list_permission_plans_without_a_valid_hint(self, anchor: str) -> None:
        """HEAD.json is never trusted."""
        commits = chain_of(30)
        bucket = self.bucket(commits)
        bucket.hint(29, anchor)
        assert run(plan(bucket.chain, commits[29])).origin == commits[1]


def test_plan_works_in_a_directory(tmp_path: Any) -> None:
    commits = chain_of(12)
    bucket = open_bucket(tmp_path)
    run(store(bucket, commits, [(shortcut_path(seal(shortcut_to(commits[9]))), seal(shortcut_to(commits[9])).data)]))
    chain = ChainReader(bucket, run(read_run(bucket)))
    assert run(plan(chain, commits[11])).origin == commits[9]
