"""The rules of retention: what can be deleted, and what must stay."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from support.clocked_bucket import HOUR, Clocked, run
from support.sweep_runs import SHORT, commit_of
from weightwire.bucket.bucket import ObjectInfo
from weightwire.chain.records import Shortcut, unseal
from weightwire.upkeep.retention import (
    DAY,
    Announced,
    Lease,
    Limit,
    Removal,
    Retention,
    due,
    holds_all,
    limits,
    orphans,
    settled,
)

HOURLY = {version: version * HOUR for version in range(11)}


NOW = 10 * HOUR


class TestRetentionLimit:
    def below(
        self,
        *,
        anchors: Iterable[int] = (1, 4, 7, 10),
        leases: Iterable[Lease] = (),
        keep: int = 2,
        window: float = 0.0,
    ) -> int:
        return limits(Retention(keep, window), NOW, list(anchors), leases, HOURLY)[0].version

    @pytest.mark.parametrize(("keep", "expected"), [(1, 10), (2, 7), (3, 4), (4, 1), (5, 1)])
    def test_limit_is_the_oldest_anchor_to_keep(self, keep: int, expected: int) -> None:
        assert self.below(keep=keep) == expected

    def test_limit_is_zero_without_an_anchor(self) -> None:
        assert self.below(anchors=()) == 0

    def test_replica_keeps_data_after_its_version(self) -> None:
        assert self.below(leases=[Lease("a", 5, NOW + 1), Lease("b", 3, NOW + 1)]) == 4

    def test_replica_at_the_head_keeps_nothing(self) -> None:
        assert self.below(leases=[Lease("a", 10, NOW + 1)]) == 7

    def test_expired_lease_keeps_nothing(self) -> None:
        assert self.below(leases=[Lease("a", 3, NOW)]) == 7

    def test_replica_without_a_version_keeps_nothing(self) -> None:
        assert self.below(leases=[Lease("a", -1, NOW + 1)]) == 7

    @pytest.mark.parametrize(("hours", "expected"), [(0, 7), (3, 7), (4, 7), (5, 4), (6.5, 4), (100, 0)])
    def test_young_versions_stay(self, hours: float, expected: int) -> None:
        assert self.below(window=hours * HOUR) == expected

    def test_version_dated_after_its_successors_stays(self) -> None:
        commits = {**HOURLY, 3: NOW}
        assert limits(Retention(2, HOUR), NOW, [2, 7, 10], [], commits)[0].version == 2

    def test_data_that_leads_to_young_versions_stays(self) -> None:
        assert limits(Retention(1, 5 * HOUR), NOW, [4, 7, 10], [], HOURLY)[0].version == 4
        assert limits(Retention(1, 5 * HOUR), NOW, [7, 10], [], HOURLY)[0].version == 0

    def test_limits_name_their_reason(self) -> None:
        found = limits(Retention(2, HOUR), NOW, [7, 10], [Lease("a", 2, NOW + 1)], HOURLY)
        assert found == [
            Limit(3, "replica a is at version 2"),
            Limit(7, "oldest anchor to keep"),
            Limit(10, "needed for versions committed less than 1 h ago"),
        ]

    @pytest.mark.parametrize("wrong", [{"anchors": 0}, {"window": -1.0}, {"grace": float("nan")}])
    def test_invalid_settings_are_rejected(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="must be"):
            Retention(**wrong)  # type: ignore[arg-type]


class TestGracePeriod:
    RECORDS = (Announced(4, 100.0), Announced(7, 200.0), Announced(9, 250.0))

    @pytest.mark.parametrize(("now", "expected"), [(100, 0), (149, 0), (150, 4), (249, 4), (250, 7), (300, 9)])
    def test_grace_period_starts_at_the_record(self, now: float, expected: int) -> None:
        assert settled(self.RECORDS, now, 50) == expected

    @pytest.mark.parametrize(("version", "expected"), [(0, 150), (3, 150), (4, 250), (6, 250), (8, 300), (9, None)])
    def test_due_is_the_end_of_the_grace_period(self, version: int, expected: float | None) -> None:
        assert due(self.RECORDS, version, 50) == expected


class TestAnchors:
    def test_anchor_must_be_complete_and_lead_to_the_committed_state(self, bucket: Clocked) -> None:
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

    def test_commit_with_all_weights_counts_as_an_anchor(self, bucket: Clocked) -> None:
        commit = commit_of(bucket, 1)
        assert holds_all(commit, [], {commit.files[0].path: commit.files[0].size})
        assert not holds_all(commit, [], {})


class TestOrphans:
    def found(self, bucket: Clocked, path: str, age: float, retention: Retention = SHORT) -> list[Removal]:
        return orphans(commit_of(bucket, 4), [], [ObjectInfo(path, 3, 1e6 - age)], 1e6, retention)

    def test_orphans_are_deleted_after_the_grace_period(self, bucket: Clocked) -> None:
        assert self.found(bucket, "deltas/4/other", HOUR - 1) == []
        assert [one.path for one in self.found(bucket, "deltas/4/other", HOUR)] == ["deltas/4/other"]

    def test_orphaned_anchors_are_deleted_after_a_day(self, bucket: Clocked) -> None:
        assert self.found(bucket, "anchors/4/other", DAY - 1) == []
        assert len(self.found(bucket, "anchors/4/other", DAY)) == 1
        assert self.found(bucket, "anchors/4/other", DAY, Retention(grace=2 * DAY)) == []

    def test_files_named_by_the_commit_are_not_orphans(self, bucket: Clocked) -> None:
        assert self.found(bucket, commit_of(bucket, 4).files[0].path, 100 * DAY) == []

    def test_files_named_by_a_shortcut_are_not_orphans(self, bucket: Clocked) -> None:
        path = bucket.paths("shortcuts/4/")[0]
        shortcut = unseal(run(bucket.get(path)), Shortcut, "here").record
        file = ObjectInfo(shortcut.files[0].path, 3, 0)
        assert orphans(commit_of(bucket, 4), [shortcut], [file], 100 * DAY, SHORT) == []
        assert len(orphans(commit_of(bucket, 4), [], [file], 100 * DAY, SHORT)) == 1
