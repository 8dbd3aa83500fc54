"""Sweeps: what they delete and what they keep."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.clocked_bucket import HOUR, Clocked, beat, clocked, first_weights, publish, run, stepped
from support.sweep_runs import Lived, check_whole, run_id, swept, swept_twice
from weightwire.bucket.bucket import GET_LIMIT
from weightwire.bucket.registry import open_bucket
from weightwire.chain.record_paths import commit_path, gc_path
from weightwire.chain.records import Gc, Shortcut, seal, shortcut_path, unseal
from weightwire.errors import BrokenChain, NoRun, PermissionDenied, UnsupportedFormat
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import (
    DAY,
    Limit,
    Retention,
)


class TestSweep:
    def test_gc_announces_and_deletes_after_the_grace_period(self, bucket: Clocked) -> None:
        before = bucket.paths()

        first = swept(bucket)

        assert (first.below, first.head, first.anchors, first.removed) == (7, 10, (7, 10), ())
        assert {one.due for one in first.waiting} == {bucket.now + HOUR}
        assert bucket.paths() == sorted([*before, gc_path(7)])
        bucket.now += HOUR - 1
        assert swept(bucket).removed == ()
        assert bucket.paths() == sorted([*before, gc_path(7)])
        bucket.now += 1
        last = swept(bucket)

        assert {one.path for one in last.removed} == {one.path for one in first.waiting}
        assert last.nbytes == sum(one.size for one in first.waiting)
        assert last.waiting == ()
        assert bucket.versions("deltas") == [7, 8, 9, 10]
        assert bucket.versions("anchors") == [7, 10]
        assert bucket.versions("shortcuts") == [7, 10]
        check_whole(bucket)

    def test_gc_never_deletes_records(self, bucket: Clocked) -> None:
        kinds = ("commits", "epochs", "files", "run.json", "HEAD.json")
        before = [path for path in bucket.paths() if path.split("/")[0] in kinds]

        swept_twice(bucket)

        assert set(before) < set(bucket.paths())
        assert gc_path(7) in bucket.paths()

    def test_gc_deletes_shortcuts_before_their_data(self, bucket: Clocked) -> None:
        swept_twice(bucket)

        deleted = [path.split("/")[0] for verb, path in bucket.log if verb == "delete" and "/probe" not in f"/{path}"]
        assert deleted == sorted(deleted, key=lambda folder: folder != "shortcuts")
        assert "shortcuts" in deleted

    def test_second_sweep_changes_nothing(self, bucket: Clocked) -> None:
        swept_twice(bucket)
        before = bucket.paths()

        again = swept(bucket)

        assert (again.removed, again.waiting, bucket.paths()) == ((), (), before)

    def test_gc_leaves_no_probe_object(self, bucket: Clocked) -> None:
        swept(bucket)
        assert bucket.paths("probe/") == []

    def test_run_without_an_anchor_keeps_everything(self) -> None:
        bucket = clocked()
        weights = first_weights()
        publish(bucket, stepped(weights, 1), 5, every=HOUR, clock=bucket, base=weights, anchor_every=100)
        bucket.now += 100 * DAY

        found = swept_twice(bucket)

        assert (found.below, found.removed, found.waiting) == (0, (), ())
        assert found.limits == (Limit(0, "no anchor leads to the newest version"),)
        assert bucket.paths("gc/") == []
        assert bucket.versions("deltas") == [2, 3, 4, 5, 6]

    def test_empty_bucket_has_no_run(self) -> None:
        with pytest.raises(NoRun):
            swept(clocked())

    def test_window_keeps_young_versions(self, bucket: Clocked) -> None:
        found = swept_twice(bucket, Retention(2, window=8 * HOUR + 1, grace=HOUR))
        # The last 8 hours cover version 2 and later at first, and 4 and later after the grace period.
        assert (found.below, bucket.versions("deltas")[0]) == (4, 2)
        assert gc_path(1) in bucket.paths()  # the anchor that leads to 2

    def test_live_replica_keeps_its_data(self, bucket: Clocked) -> None:
        bucket.write(*beat(run_id(bucket), "slow", 4, lease=10 * HOUR))

        found = swept_twice(bucket)

        assert found.below == 5
        assert [(one.name, one.version) for one in found.leases] == [("slow", 4)]
        assert bucket.versions("deltas") == [5, 6, 7, 8, 9, 10]

    def test_lease_is_measured_by_the_stores_clock(self, bucket: Clocked) -> None:
        """The clock of a replica is not trusted."""
        path, data = beat(run_id(bucket), "slow", 4, lease=HOUR, time=1e12)
        bucket.write(path, data)
        bucket.now += HOUR - 1
        assert swept(bucket).below == 5
        bucket.now += 1
        assert swept(bucket).below == 7

    def test_replica_that_returns_in_the_grace_period_keeps_its_data(self, bucket: Clocked) -> None:
        assert swept(bucket).below == 7
        bucket.now += HOUR + 1
        bucket.write(*beat(run_id(bucket), "back", 2))

        found = swept(bucket)

        assert found.below == 3
        assert bucket.paths("gc/") == [gc_path(7)]  # the record stays valid
        assert bucket.versions("deltas")[0] == 3
        assert bucket.versions("anchors") == [4, 7, 10]

    def test_each_record_has_its_own_grace_period(self, lived: Lived) -> None:
        bucket = lived.bucket
        swept(bucket)
        publish(bucket, stepped(lived.weights, 3), 6, every=HOUR, clock=bucket, anchor_every=3)

        found = swept(bucket)

        assert (found.below, found.head) == (14, 17)
        assert bucket.versions("deltas")[0] == 7
        assert {one.due for one in found.waiting} == {bucket.now + HOUR}
        check_whole(bucket)

    def test_anchor_without_data_does_not_count(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/7/")[0]))
        assert swept(bucket).anchors == (4, 10)

    def test_truncated_anchor_does_not_count(self, bucket: Clocked) -> None:
        bucket.write(bucket.paths("anchors/7/")[0], b"short")
        assert swept(bucket).anchors == (4, 10)

    def test_anchor_that_does_not_lead_to_the_newest_version_does_not_count(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("deltas/9/")[0]))

        found = swept_twice(bucket)

        assert (found.anchors, found.below) == ((10,), 10)
        check_gone = run(verify_run(bucket, Runtime(), rebuild=True))
        assert check_gone.rebuilt == ((10, 10),)

    def test_unreachable_newest_version_keeps_everything(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/10/")[0]))
        run(bucket.inner.delete(bucket.paths("deltas/9/")[0]))
        assert swept_twice(bucket).removed == ()

    def test_shortcut_to_another_state_does_not_count(self, bucket: Clocked) -> None:
        shortcut = unseal(run(bucket.get(bucket.paths("shortcuts/10/")[0])), Shortcut, "here").record
        run(bucket.inner.delete(bucket.paths("shortcuts/10/")[0]))
        wrong = msgspec.structs.replace(shortcut, after="0" * 64)
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)

        assert swept(bucket).anchors == (4, 7)

    def test_dry_run_writes_nothing_and_lists_the_same(self, bucket: Clocked) -> None:
        swept(bucket)
        bucket.now += HOUR
        bucket.write(*beat(run_id(bucket), "new", 10))  # a recent object, from which a dry run takes the time
        bucket.log.clear()

        dry = swept(bucket, dry_run=True)

        assert bucket.log == []
        assert dry.dry_run
        assert dry.removed == swept(bucket).removed != ()

    def test_dry_run_lists_announced_data(self, bucket: Clocked) -> None:
        dry = swept(bucket, dry_run=True)

        assert (dry.below, dry.removed) == (7, ())
        assert {one.due for one in dry.waiting} == {bucket.now + HOUR}
        assert bucket.paths("gc/") == []

    def test_dry_run_uses_the_time_of_the_newest_object(self, bucket: Clocked) -> None:
        """So it never lists too much."""
        swept(bucket)
        bucket.now += 100 * DAY

        assert swept(bucket, dry_run=True).removed == ()
        assert swept(bucket).removed != ()

    def test_key_without_write_permission_deletes_nothing(self, bucket: Clocked) -> None:
        bucket.now += 100 * DAY
        bucket.read_only = True
        with pytest.raises(PermissionDenied):
            swept(bucket)

    def test_gc_works_in_a_directory(self, tmp_path: Path) -> None:
        bucket = open_bucket(tmp_path)
        publish(bucket, first_weights(), 7, anchor_every=2)
        retention = Retention(1, 0.0, 0.0)

        found = run(sweep(bucket, Runtime(), retention))

        assert (found.below, found.anchors) == (7, (7,))
        assert sorted(path.name for path in (tmp_path / "deltas").iterdir()) == ["7"]
        assert sorted(path.name for path in (tmp_path / "commits").iterdir())[0] == "00000000000000000000.json"
        result = run(verify_run(bucket, Runtime(), rebuild=True))
        assert (result.problems, result.rebuilt) == ((), ((7, 7),))


class TestStrayObjects:
    def old(self, bucket: Clocked, path: str, age: float = 3 * DAY) -> str:
        bucket.write(path, b"orphan")
        bucket.times[path] = bucket.now - age
        return path

    def test_orphans_of_a_committed_version_are_deleted(self, bucket: Clocked) -> None:
        delta = self.old(bucket, "deltas/9/e1-r0-0123456789abcdef.safetensors", 2 * HOUR)
        anchor = self.old(bucket, "anchors/9/e1-r0-0123456789abcdef.safetensors")
        zero = self.old(bucket, "deltas/0/e7-r0-0123456789abcdef.safetensors")

        found = swept(bucket)

        assert {one.path for one in found.removed} == {delta, anchor, zero}
        assert found.removed[0].why.startswith("orphaned: ")
        assert not {delta, anchor, zero} & set(bucket.paths())
        check_whole(bucket)

    def test_objects_of_an_uncommitted_version_stay(self, bucket: Clocked) -> None:
        path = self.old(bucket, "deltas/11/e1-r0-0123456789abcdef.safetensors", 100 * DAY)
        assert swept(bucket).removed == ()
        assert path in bucket.paths()

    def test_young_orphans_stay(self, bucket: Clocked) -> None:
        self.old(bucket, "deltas/9/e1-r0-0123456789abcdef.safetensors", HOUR / 2)
        self.old(bucket, "anchors/9/e1-r0-0123456789abcdef.safetensors", 2 * HOUR)
        assert swept(bucket).removed == ()

    @pytest.mark.parametrize(
        "data", [b'{"format": "weightwire/2"}', b"nonsense", b'{"format": "weightwire/1", "kind": "delta"}']
    )
    def test_orphans_stay_if_an_unreadable_shortcut_may_name_them(self, bucket: Clocked, data: bytes) -> None:
        path = self.old(bucket, "deltas/9/e1-r0-0123456789abcdef.safetensors")
        bucket.write("shortcuts/9/merged-0123.json", data)

        assert swept(bucket).removed == ()
        run(bucket.inner.delete("shortcuts/9/merged-0123.json"))
        assert [one.path for one in swept(bucket).removed] == [path]

    def test_orphans_of_a_deleted_version_are_listed_once(self, bucket: Clocked) -> None:
        path = self.old(bucket, "deltas/3/e1-r0-0123456789abcdef.safetensors")

        first = swept(bucket)

        assert [one.path for one in first.removed] == [path]
        assert path not in {one.path for one in first.waiting}
        bucket.now += HOUR
        self.old(bucket, path)
        last = [one.path for one in swept(bucket).removed]
        assert path in last
        assert len(last) == len(set(last))

    def test_objects_with_unknown_names_stay(self, bucket: Clocked) -> None:
        """They may belong to another program."""
        paths = [self.old(bucket, path) for path in ("deltas/readme", "notes/9/x", "anchors/x9/y")]
        assert swept(bucket).removed == ()
        assert set(paths) < set(bucket.paths())

    def test_probe_objects_are_deleted_after_a_day(self, bucket: Clocked) -> None:
        old, new = self.old(bucket, "probe/" + 32 * "0" + "-1", DAY), self.old(bucket, "probe/" + 32 * "1", DAY - 1)
        other = self.old(bucket, "probe/results.csv", 2 * DAY)
        assert [one.path for one in swept(bucket).removed] == [old]
        assert {new, other} <= set(bucket.paths()), "names that no probe has belong to someone else"

    def test_old_heartbeats_are_deleted(self, bucket: Clocked) -> None:
        for name, age in (("old", DAY), ("late", DAY - 1)):
            path, data = beat(run_id(bucket), name, 4)
            bucket.write(path, data)
            bucket.times[path] = bucket.now - age

        assert [one.path for one in swept(bucket).removed] == ["replicas/old.json"]
        assert swept(bucket, Retention(window=2 * DAY)).removed == ()

    def test_lease_lasts_a_day_at_most(self, bucket: Clocked) -> None:
        path, data = beat(run_id(bucket), "long", 4, lease=10 * DAY)
        bucket.write(path, data)
        bucket.times[path] = bucket.now - 0.9 * DAY
        assert swept(bucket).below == 5
        bucket.times[path] = bucket.now - 1.1 * DAY
        assert swept(bucket).below == 7

    def test_heartbeat_that_is_renewed_meanwhile_stays(self, bucket: Clocked) -> None:
        path, data = beat(run_id(bucket), "old", 4)
        bucket.write(path, data)
        bucket.times[path] = bucket.now - 2 * DAY

        async def renew(verb: str, wanted: str) -> None:
            if (verb, wanted) == ("find", path):
                bucket.times[path] = bucket.now

        bucket.hook = renew
        swept(bucket)

        assert path in bucket.paths()


class TestHostileRecords:
    @pytest.mark.parametrize("data", [b"", b"nonsense", b'{"format": "weightwire/1"}'])
    def test_unreadable_heartbeat_stops_gc_for_a_day(self, bucket: Clocked, data: bytes) -> None:
        bucket.write("replicas/x.json", data)
        with pytest.raises(BrokenChain):
            swept(bucket)
        bucket.now += DAY
        assert swept(bucket).below == 7

    def test_heartbeat_of_another_run_is_ignored(self, bucket: Clocked) -> None:
        bucket.write(*beat("0" * 32, "x", 2))
        assert swept(bucket).below == 7

    def test_heartbeat_of_a_newer_release_stops_gc_for_a_day(self, bucket: Clocked) -> None:
        """The replica may need any data."""
        bucket.write("replicas/x.json", b'{"format": "weightwire/2"}')
        with pytest.raises(UnsupportedFormat):
            swept(bucket)
        assert bucket.paths("gc/") == []
        bucket.now += DAY
        assert [one.path for one in swept(bucket).removed] == ["replicas/x.json"]

    def test_commit_of_a_newer_release_stops_gc(self, bucket: Clocked) -> None:
        bucket.write(commit_path(11), b'{"format": "weightwire/2"}')
        with pytest.raises(UnsupportedFormat):
            swept(bucket)
        assert bucket.paths("gc/") == []

    @pytest.mark.parametrize("version", [0, 5, 9])
    def test_missing_commit_stops_gc(self, bucket: Clocked, version: int) -> None:
        swept(bucket)
        bucket.now += HOUR
        run(bucket.inner.delete(commit_path(version)))
        before = bucket.paths()

        with pytest.raises(BrokenChain, match=f"{version:020d}"):
            swept(bucket)

        assert bucket.paths() == before

    def test_commit_far_ahead_stops_gc(self, bucket: Clocked) -> None:
        bucket.write("commits/99999999999999999999.json", b"x")
        with pytest.raises(BrokenChain, match=f"{11:020d}"):
            swept(bucket)

    @pytest.mark.parametrize("run_name", ["", "0" * 32])
    def test_gc_record_of_another_run_is_ignored(self, bucket: Clocked, run_name: str) -> None:
        data = seal(Gc(run=run_name, below=10)).data if run_name else b"nonsense"
        bucket.write(gc_path(10), data)
        bucket.now += DAY

        found = swept(bucket)

        assert (found.below, found.removed) == (7, ())
        assert gc_path(7) in bucket.paths()

    def test_gc_record_under_another_number_is_ignored(self, bucket: Clocked) -> None:
        bucket.write(gc_path(9), seal(Gc(run=run_id(bucket), below=10)).data)
        bucket.now += DAY
        assert swept(bucket).removed == ()

    def test_gc_record_cannot_override_the_rules(self, bucket: Clocked) -> None:
        bucket.write(gc_path(11), seal(Gc(run=run_id(bucket), below=11)).data)
        bucket.now += DAY

        assert swept(bucket).removed == ()  # nothing was announced properly
        bucket.now += DAY
        assert swept(bucket).below == 7
        assert bucket.versions("deltas") == [7, 8, 9, 10]


class Forbidding(Clocked):
    """Answers 403 for heartbeats, missing or not. `late` is listed, but deleted before it is read."""

    late = ""

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        if path.startswith("replicas/"):
            await self.delete(self.late)
            raise PermissionDenied(f"{path}: AccessDenied")
        return await super().get(path, limit)


class TestForbiddenRecords:
    def forbidding(self, bucket: Clocked) -> Forbidding:
        found = Forbidding(bucket, bucket.now)
        found.write(*beat(run_id(bucket), "gpu-0", 1))
        return found

    def test_forbidden_heartbeat_stops_gc(self, bucket: Clocked) -> None:
        """It must not look like a deleted one: its replica may need the data."""
        forbidding = self.forbidding(bucket)
        forbidding.late = "replicas/another.json"
        with pytest.raises(PermissionDenied):
            swept(forbidding)

    def test_deleted_heartbeat_does_not_stop_gc_if_the_store_calls_it_forbidden(self, bucket: Clocked) -> None:
        forbidding = self.forbidding(bucket)
        forbidding.late = "replicas/gpu-0.json"
        assert swept(forbidding).leases == ()
