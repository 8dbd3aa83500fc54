"""Sweeps: what goes and what stays, whatever is in the bucket."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.clocked_bucket import HOUR, Clocked, beat, clocked, first_weights, publish, run, stepped
from support.sweep_runs import Lived, check_whole, run_id, swept, swept_twice
from weightwire.bucket.registry import open_bucket
from weightwire.chain.records import (
    Gc,
    Shortcut,
    commit_path,
    gc_path,
    seal,
    shortcut_path,
    unseal,
)
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
    def test_announces_first_and_deletes_after_the_grace_period(self, bucket: Clocked) -> None:
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

    def test_never_deletes_records(self, bucket: Clocked) -> None:
        kinds = ("commits", "epochs", "files", "run.json", "HEAD.json")
        before = [path for path in bucket.paths() if path.split("/")[0] in kinds]

        swept_twice(bucket)

        assert set(before) < set(bucket.paths())
        assert gc_path(7) in bucket.paths()

    def test_deletes_shortcuts_before_what_they_lead_to(self, bucket: Clocked) -> None:
        swept_twice(bucket)

        deleted = [path.split("/")[0] for verb, path in bucket.log if verb == "delete" and "/probe" not in f"/{path}"]
        assert deleted == sorted(deleted, key=lambda folder: folder != "shortcuts")
        assert "shortcuts" in deleted

    def test_again_changes_nothing(self, bucket: Clocked) -> None:
        swept_twice(bucket)
        before = bucket.paths()

        again = swept(bucket)

        assert (again.removed, again.waiting, bucket.paths()) == ((), (), before)

    def test_leaves_no_probe(self, bucket: Clocked) -> None:
        swept(bucket)
        assert bucket.paths("probe/") == []

    def test_without_an_anchor_nothing_goes(self) -> None:
        bucket = clocked()
        weights = first_weights()
        publish(bucket, stepped(weights, 1), 5, every=HOUR, clock=bucket, base=weights, anchor_every=100)
        bucket.now += 100 * DAY

        found = swept_twice(bucket)

        assert (found.below, found.removed, found.waiting) == (0, (), ())
        assert found.limits == (Limit(0, "no anchor leads to the newest version"),)
        assert bucket.paths("gc/") == []
        assert bucket.versions("deltas") == [2, 3, 4, 5, 6]

    def test_of_an_empty_place_is_refused(self) -> None:
        with pytest.raises(NoRun):
            swept(clocked())

    def test_what_is_younger_than_the_window_stays(self, bucket: Clocked) -> None:
        found = swept_twice(bucket, Retention(2, window=8 * HOUR + 1, grace=HOUR))
        # At first those of the last 8 hours are 2 and later; more than an hour later, 4 and later.
        assert (found.below, bucket.versions("deltas")[0]) == (4, 2)
        assert gc_path(1) in bucket.paths()  # the anchor that leads to 2

    def test_what_a_live_replica_needs_stays(self, bucket: Clocked) -> None:
        bucket.write(*beat(run_id(bucket), "slow", 4, lease=10 * HOUR))

        found = swept_twice(bucket)

        assert found.below == 5
        assert [(one.name, one.version) for one in found.leases] == [("slow", 4)]
        assert bucket.versions("deltas") == [5, 6, 7, 8, 9, 10]

    def test_a_lease_counts_from_what_the_store_says(self, bucket: Clocked) -> None:
        """A replica's own clock may say anything."""
        path, data = beat(run_id(bucket), "slow", 4, lease=HOUR, time=1e12)
        bucket.write(path, data)
        bucket.now += HOUR - 1
        assert swept(bucket).below == 5
        bucket.now += 1
        assert swept(bucket).below == 7

    def test_a_replica_that_comes_back_during_the_grace_period_holds_what_it_needs(self, bucket: Clocked) -> None:
        assert swept(bucket).below == 7
        bucket.now += HOUR + 1
        bucket.write(*beat(run_id(bucket), "back", 2))

        found = swept(bucket)

        assert found.below == 3
        assert bucket.paths("gc/") == [gc_path(7)]  # which has not become untrue
        assert bucket.versions("deltas")[0] == 3
        assert bucket.versions("anchors") == [4, 7, 10]

    def test_a_later_record_waits_for_its_own_grace_period(self, lived: Lived) -> None:
        bucket = lived.bucket
        swept(bucket)
        publish(bucket, stepped(lived.weights, 3), 6, every=HOUR, clock=bucket, anchor_every=3)

        found = swept(bucket)

        assert (found.below, found.head) == (14, 17)
        assert bucket.versions("deltas")[0] == 7
        assert {one.due for one in found.waiting} == {bucket.now + HOUR}
        check_whole(bucket)

    def test_an_anchor_whose_data_is_lost_is_none(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/7/")[0]))
        assert swept(bucket).anchors == (4, 10)

    def test_an_anchor_that_was_cut_off_is_none(self, bucket: Clocked) -> None:
        bucket.write(bucket.paths("anchors/7/")[0], b"short")
        assert swept(bucket).anchors == (4, 10)

    def test_an_anchor_from_which_the_newest_cannot_be_reached_is_none(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("deltas/9/")[0]))

        found = swept_twice(bucket)

        assert (found.anchors, found.below) == ((10,), 10)
        check_gone = run(verify_run(bucket, Runtime(), rebuild=True))
        assert check_gone.rebuilt == ((10, 10),)

    def test_nothing_goes_where_no_anchor_leads_to_the_newest(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/10/")[0]))
        run(bucket.inner.delete(bucket.paths("deltas/9/")[0]))
        assert swept_twice(bucket).removed == ()

    def test_a_shortcut_to_another_state_is_no_anchor(self, bucket: Clocked) -> None:
        shortcut = unseal(run(bucket.get(bucket.paths("shortcuts/10/")[0])), Shortcut, "here").record
        run(bucket.inner.delete(bucket.paths("shortcuts/10/")[0]))
        wrong = msgspec.structs.replace(shortcut, after="0" * 64)
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)

        assert swept(bucket).anchors == (4, 7)

    def test_a_dry_run_writes_nothing_and_lists_the_same(self, bucket: Clocked) -> None:
        swept(bucket)
        bucket.now += HOUR
        bucket.write(*beat(run_id(bucket), "new", 10))  # so that something tells the time
        bucket.log.clear()

        dry = swept(bucket, dry_run=True)

        assert bucket.log == []
        assert dry.dry_run
        assert dry.removed == swept(bucket).removed != ()

    def test_a_dry_run_tells_what_would_wait(self, bucket: Clocked) -> None:
        dry = swept(bucket, dry_run=True)

        assert (dry.below, dry.removed) == (7, ())
        assert {one.due for one in dry.waiting} == {bucket.now + HOUR}
        assert bucket.paths("gc/") == []

    def test_a_dry_run_takes_the_newest_object_for_the_present(self, bucket: Clocked) -> None:
        """And so it never lists too much."""
        swept(bucket)
        bucket.now += 100 * DAY

        assert swept(bucket, dry_run=True).removed == ()
        assert swept(bucket).removed != ()

    def test_without_the_right_to_write_there_is_no_time_and_no_harm(self, bucket: Clocked) -> None:
        bucket.now += 100 * DAY
        bucket.read_only = True
        with pytest.raises(PermissionDenied):
            swept(bucket)

    def test_in_a_directory(self, tmp_path: Path) -> None:
        bucket = open_bucket(tmp_path)
        publish(bucket, first_weights(), 7, anchor_every=2)
        retention = Retention(1, 0.0, 0.0)

        found = run(sweep(bucket, Runtime(), retention))

        assert (found.below, found.anchors) == (7, (7,))
        assert sorted(path.name for path in (tmp_path / "deltas").iterdir()) == ["7"]
        assert sorted(path.name for path in (tmp_path / "commits").iterdir())[0] == "00000000000000000000.json"
        result = run(verify_run(bucket, Runtime(), rebuild=True))
        assert (result.problems, result.rebuilt) == ((), ((7, 7),))


class TestStrays:
    def old(self, bucket: Clocked, path: str, age: float = 3 * DAY) -> str:
        bucket.write(path, b"orphan")
        bucket.times[path] = bucket.now - age
        return path

    def test_of_a_committed_version_go(self, bucket: Clocked) -> None:
        delta = self.old(bucket, "deltas/9/e1-r0-0123456789abcdef.safetensors", 2 * HOUR)
        anchor = self.old(bucket, "anchors/9/e1-r0-0123456789abcdef.safetensors")
        zero = self.old(bucket, "deltas/0/e7-r0-0123456789abcdef.safetensors")

        found = swept(bucket)

        assert {one.path for one in found.removed} == {delta, anchor, zero}
        assert found.removed[0].why.startswith("an orphan: ")
        assert not {delta, anchor, zero} & set(bucket.paths())
        check_whole(bucket)

    def test_of_a_version_that_is_not_committed_stay(self, bucket: Clocked) -> None:
        path = self.old(bucket, "deltas/11/e1-r0-0123456789abcdef.safetensors", 100 * DAY)
        assert swept(bucket).removed == ()
        assert path in bucket.paths()

    def test_that_are_young_stay(self, bucket: Clocked) -> None:
        self.old(bucket, "deltas/9/e1-r0-0123456789abcdef.safetensors", HOUR / 2)
        self.old(bucket, "anchors/9/e1-r0-0123456789abcdef.safetensors", 2 * HOUR)
        assert swept(bucket).removed == ()

    @pytest.mark.parametrize(
        "data", [b'{"format": "weightwire/2"}', b"nonsense", b'{"format": "weightwire/1", "kind": "delta"}']
    )
    def test_that_a_record_may_name_which_we_cannot_read_stay(self, bucket: Clocked, data: bytes) -> None:
        path = self.old(bucket, "deltas/9/e1-r0-0123456789abcdef.safetensors")
        bucket.write("shortcuts/9/merged-0123.json", data)

        assert swept(bucket).removed == ()
        run(bucket.inner.delete("shortcuts/9/merged-0123.json"))
        assert [one.path for one in swept(bucket).removed] == [path]

    def test_of_a_version_that_goes_anyway_are_told_of_once(self, bucket: Clocked) -> None:
        path = self.old(bucket, "deltas/3/e1-r0-0123456789abcdef.safetensors")

        first = swept(bucket)

        assert [one.path for one in first.removed] == [path]
        assert path not in {one.path for one in first.waiting}
        bucket.now += HOUR
        self.old(bucket, path)
        last = [one.path for one in swept(bucket).removed]
        assert path in last
        assert len(last) == len(set(last))

    def test_are_not_what_has_another_name(self, bucket: Clocked) -> None:
        """Who knows whose it is."""
        paths = [self.old(bucket, path) for path in ("deltas/readme", "notes/9/x", "anchors/x9/y")]
        assert swept(bucket).removed == ()
        assert set(paths) < set(bucket.paths())

    def test_probes_go_after_a_day(self, bucket: Clocked) -> None:
        old, new = self.old(bucket, "probe/old", DAY), self.old(bucket, "probe/new", DAY - 1)
        assert [one.path for one in swept(bucket).removed] == [old]
        assert new in bucket.paths()

    def test_heartbeats_go_when_they_are_forgotten(self, bucket: Clocked) -> None:
        for name, age in (("old", DAY), ("late", DAY - 1)):
            path, data = beat(run_id(bucket), name, 4)
            bucket.write(path, data)
            bucket.times[path] = bucket.now - age

        assert [one.path for one in swept(bucket).removed] == ["replicas/old.json"]
        assert swept(bucket, Retention(window=2 * DAY)).removed == ()

    def test_a_lease_lasts_a_day_at_most(self, bucket: Clocked) -> None:
        path, data = beat(run_id(bucket), "long", 4, lease=10 * DAY)
        bucket.write(path, data)
        bucket.times[path] = bucket.now - 0.9 * DAY
        assert swept(bucket).below == 5
        bucket.times[path] = bucket.now - 1.1 * DAY
        assert swept(bucket).below == 7

    def test_a_replica_that_comes_back_at_that_moment_is_not_forgotten(self, bucket: Clocked) -> None:
        path, data = beat(run_id(bucket), "old", 4)
        bucket.write(path, data)
        bucket.times[path] = bucket.now - 2 * DAY

        async def renew(verb: str, wanted: str) -> None:
            if (verb, wanted) == ("find", path):
                bucket.times[path] = bucket.now

        bucket.hook = renew
        swept(bucket)

        assert path in bucket.paths()


class TestHostile:
    @pytest.mark.parametrize("data", [b"", b"nonsense", b'{"format": "weightwire/1"}'])
    def test_a_heartbeat_that_cannot_be_read_stops_everything_for_a_day(self, bucket: Clocked, data: bytes) -> None:
        bucket.write("replicas/x.json", data)
        with pytest.raises(BrokenChain):
            swept(bucket)
        bucket.now += DAY
        assert swept(bucket).below == 7

    def test_a_heartbeat_of_another_run_holds_nothing(self, bucket: Clocked) -> None:
        bucket.write(*beat("0" * 32, "x", 2))
        assert swept(bucket).below == 7

    def test_a_heartbeat_of_a_newer_release_stops_everything(self, bucket: Clocked) -> None:
        """It needs who knows what. For as long as a replica is remembered."""
        bucket.write("replicas/x.json", b'{"format": "weightwire/2"}')
        with pytest.raises(UnsupportedFormat):
            swept(bucket)
        assert bucket.paths("gc/") == []
        bucket.now += DAY
        assert [one.path for one in swept(bucket).removed] == ["replicas/x.json"]

    def test_a_commit_of_a_newer_release_stops_everything(self, bucket: Clocked) -> None:
        bucket.write(commit_path(11), b'{"format": "weightwire/2"}')
        with pytest.raises(UnsupportedFormat):
            swept(bucket)
        assert bucket.paths("gc/") == []

    @pytest.mark.parametrize("version", [0, 5, 9])
    def test_a_hole_in_the_chain_stops_everything(self, bucket: Clocked, version: int) -> None:
        swept(bucket)
        bucket.now += HOUR
        run(bucket.inner.delete(commit_path(version)))
        before = bucket.paths()

        with pytest.raises(BrokenChain, match=f"{version:020d}"):
            swept(bucket)

        assert bucket.paths() == before

    def test_a_commit_from_far_ahead_stops_everything(self, bucket: Clocked) -> None:
        bucket.write("commits/99999999999999999999.json", b"x")
        with pytest.raises(BrokenChain, match=f"{11:020d}"):
            swept(bucket)

    @pytest.mark.parametrize("run_name", ["", "0" * 32])
    def test_a_gc_record_that_is_none_of_this_run_allows_nothing(self, bucket: Clocked, run_name: str) -> None:
        data = seal(Gc(run=run_name, below=10)).data if run_name else b"nonsense"
        bucket.write(gc_path(10), data)
        bucket.now += DAY

        found = swept(bucket)

        assert (found.below, found.removed) == (7, ())
        assert gc_path(7) in bucket.paths()

    def test_a_gc_record_under_another_number_allows_nothing(self, bucket: Clocked) -> None:
        bucket.write(gc_path(9), seal(Gc(run=run_id(bucket), below=10)).data)
        bucket.now += DAY
        assert swept(bucket).removed == ()

    def test_a_gc_record_that_says_too_much_allows_no_more_than_the_rules(self, bucket: Clocked) -> None:
        bucket.write(gc_path(11), seal(Gc(run=run_id(bucket), below=11)).data)
        bucket.now += DAY

        assert swept(bucket).removed == ()  # nothing that was properly announced
        bucket.now += DAY
        assert swept(bucket).below == 7
        assert bucket.versions("deltas") == [7, 8, 9, 10]
