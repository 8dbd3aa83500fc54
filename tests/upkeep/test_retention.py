"""The rules of retention: what may go, and what must stay."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from support.clocked_bucket import HOUR, Clocked, run
from support.sweep_runs import SHORT, commit_of
from weightwire.bucket.bucket import ObjectInfo
from weightwire.chain.records import (
    Shortcut,
    unseal,
)
from weightwire.upkeep.retention import (
    DAY,
    Announced,
    Lease,
    Limit,
    Removal,
    Retention,
    below,
    due,
    holds_all,
    limits,
    orphans,
    settled,
)

HOURLY = {version: version * HOUR for version in range(11)}


NOW = 10 * HOUR


class TestBelow:
    def below(
        self,
        *,
        anchors: Iterable[int] = (1, 4, 7, 10),
        leases: Iterable[Lease] = (),
        keep: int = 2,
        window: float = 0.0,
    ) -> int:
        return below(Retention(keep, window), NOW, list(anchors), leases, HOURLY)

    @pytest.mark.parametrize(("keep", "expected"), [(1, 10), (2, 7), (3, 4), (4, 1), (5, 1)])
    def test_the_oldest_anchor_that_is_kept(self, keep: int, expected: int) -> None:
        assert self.below(keep=keep) == expected

    def test_nothing_without_an_anchor(self) -> None:
        assert self.below(anchors=()) == 0

    def test_a_replica_needs_what_comes_after_its_version(self) -> None:
        assert self.below(leases=[Lease("a", 5, NOW + 1), Lease("b", 3, NOW + 1)]) == 4

    def test_a_replica_that_is_at_the_head_needs_nothing_old(self) -> None:
        assert self.below(leases=[Lease("a", 10, NOW + 1)]) == 7

    def test_a_lease_that_has_ended_holds_nothing(self) -> None:
        assert self.below(leases=[Lease("a", 3, NOW)]) == 7

    def test_a_replica_that_holds_nothing_yet_needs_an_anchor_only(self) -> None:
        assert self.below(leases=[Lease("a", -1, NOW + 1)]) == 7

    @pytest.mark.parametrize(("hours", "expected"), [(0, 7), (3, 7), (4, 7), (5, 4), (6.5, 4), (100, 0)])
    def test_what_is_young_stays(self, hours: float, expected: int) -> None:
        assert self.below(window=hours * HOUR) == expected

    def test_one_that_is_dated_later_than_its_successors_stays_too(self) -> None:
        commits = {**HOURLY, 3: NOW}
        assert below(Retention(2, HOUR), NOW, [2, 7, 10], [], commits) == 2

    def test_what_leads_to_young_versions_stays_too(self) -> None:
        assert below(Retention(1, 5 * HOUR), NOW, [4, 7, 10], [], HOURLY) == 4
        assert below(Retention(1, 5 * HOUR), NOW, [7, 10], [], HOURLY) == 0

    def test_says_what_holds_it_back(self) -> None:
        found = limits(Retention(2, HOUR), NOW, [7, 10], [Lease("a", 2, NOW + 1)], HOURLY)
        assert found == [
            Limit(3, "replica a is at version 2"),
            Limit(7, "the oldest anchor that is kept"),
            Limit(10, "leads to versions committed less than 1 h ago"),
        ]

    @pytest.mark.parametrize("wrong", [{"anchors": 0}, {"window": -1.0}, {"grace": float("nan")}])
    def test_refuses_nonsense(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="must be"):
            Retention(**wrong)  # type: ignore[arg-type]


class TestGrace:
    RECORDS = (Announced(4, 100.0), Announced(7, 200.0), Announced(9, 250.0))

    @pytest.mark.parametrize(("now", "expected"), [(100, 0), (149, 0), (150, 4), (249, 4), (250, 7), (300, 9)])
    def test_counts_from_the_record(self, now: float, expected: int) -> None:
        assert settled(self.RECORDS, now, 50) == expected

    @pytest.mark.parametrize(("version", "expected"), [(0, 150), (3, 150), (4, 250), (6, 250), (8, 300), (9, None)])
    def test_says_when(self, version: int, expected: float | None) -> None:
        assert due(self.RECORDS, version, 50) == expected


class TestAnchors:
    def test_must_be_there_whole_and_lead_to_the_committed_state(self, bucket: Clocked) -> None:
        commit = commit_of(bucket, 4)
        path = bucket.paths("shortcuts/4/")[0]
        shortcut = unseal(run(bucket.get(path)), Shortcut, "here").record
        sizes = {one.path: one.size for one in run(bucket.list("anchors/"))}
        other = msgspec.structs.replace(shortcut, after="0" * 64)

        assert holds_all(commit, [shortcut], sizes)
        assert not holds_all(commit, [], sizes)
        assert not holds_all(commit, [other], sizes)
        assert not holds_all(commit, [shortcut], {**sizes, shortcut.files[0].path: 5})
        assert not holds_all(commit, [shortcut], {})

    def test_may_be_a_commit(self, bucket: Clocked) -> None:
        commit = commit_of(bucket, 1)
        assert holds_all(commit, [], {commit.files[0].path: commit.files[0].size})
        assert not holds_all(commit, [], {})


class TestOrphans:
    def found(self, bucket: Clocked, path: str, age: float, retention: Retention = SHORT) -> list[Removal]:
        return orphans(commit_of(bucket, 4), [], [ObjectInfo(path, 3, 1e6 - age)], 1e6, retention)

    def test_wait_for_the_grace_period(self, bucket: Clocked) -> None:
        assert self.found(bucket, "deltas/4/other", HOUR - 1) == []
        assert [one.path for one in self.found(bucket, "deltas/4/other", HOUR)] == ["deltas/4/other"]

    def test_of_an_anchor_wait_for_a_day(self, bucket: Clocked) -> None:
        assert self.found(bucket, "anchors/4/other", DAY - 1) == []
        assert len(self.found(bucket, "anchors/4/other", DAY)) == 1
        assert self.found(bucket, "anchors/4/other", DAY, Retention(grace=2 * DAY)) == []

    def test_are_not_what_the_commit_names(self, bucket: Clocked) -> None:
        assert self.found(bucket, commit_of(bucket, 4).files[0].path, 100 * DAY) == []

    def test_are_not_what_a_shortcut_names(self, bucket: Clocked) -> None:
        path = bucket.paths("shortcuts/4/")[0]
        shortcut = unseal(run(bucket.get(path)), Shortcut, "here").record
        file = ObjectInfo(shortcut.files[0].path, 3, 0)
        assert orphans(commit_of(bucket, 4), [shortcut], [file], 100 * DAY, SHORT) == []
        assert len(orphans(commit_of(bucket, 4), [], [file], 100 * DAY, SHORT)) == 1
