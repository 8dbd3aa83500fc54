"""Anchors are read before older data is deleted: junk and damaged anchors do not count."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import pytest

from support.clocked_bucket import HOUR, Clocked, first_weights, publish, run, stepped
from support.commands import weightwire
from support.sweep_runs import SHORT, Lived, commit_of, run_id, swept, swept_twice
from weightwire import Delta
from weightwire.bucket.registry import open_bucket
from weightwire.chain.record_paths import data_path
from weightwire.chain.records import DataFile, Shortcut, seal, shortcut_path
from weightwire.system.runtime import Runtime
from weightwire.upkeep import anchor_check
from weightwire.upkeep.anchor_check import VerifiedFiles
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import DAY, Retention, relied_on


def add_shortcut(bucket: Clocked, version: int, data: bytes, sha256: str | None = None) -> str:
    """A valid shortcut that names these bytes as an anchor. Returns the path of the data."""
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    path = data_path("anchor", version, 1, 0, sha256)
    bucket.write(path, data)
    record = Shortcut(
        run=run_id(bucket),
        version=version,
        kind="anchor",
        after=commit_of(bucket, version).after,
        files=(DataFile(path, len(data), sha256),),
    )
    sealed = seal(record)
    bucket.write(shortcut_path(sealed), sealed.data)
    return path


def anchor_path(bucket: Clocked, version: int) -> str:
    (path,) = bucket.paths(f"anchors/{version}/")
    return path


def spoil(bucket: Clocked, path: str) -> None:
    """Changes one byte and keeps the time, as rot does."""
    data = bytearray(run(bucket.get(path)))
    data[-1] ^= 1
    modified = bucket.times[path]
    bucket.write(path, bytes(data))
    bucket.times[path] = modified


class TestJunk:
    def test_random_bytes_do_not_replace_the_only_good_anchor(self, bucket: Clocked) -> None:
        for version in (4, 7, 10):
            for path in [*bucket.paths(f"shortcuts/{version}/"), *bucket.paths(f"anchors/{version}/")]:
                run(bucket.delete(path))
        junk = [add_shortcut(bucket, version, os.urandom(100)) for version in (9, 10)]

        found = swept_twice(bucket)

        assert found.anchors == (1,)
        assert {one.path for one in found.damaged} == set(junk)
        assert found.removed == ()
        assert bucket.versions("anchors") == [1, 9, 10]
        assert bucket.versions("deltas") == list(range(2, 11))

    def test_an_anchor_of_other_weights_does_not_count(self, bucket: Clocked) -> None:
        """Its header says what it is."""
        other = run(bucket.get(anchor_path(bucket, 4)))
        delta = run(bucket.get(bucket.paths("deltas/9/")[0]))
        junk = {
            add_shortcut(bucket, 9, other): "leads to another state than its shortcut names",
            add_shortcut(bucket, 8, delta): "not a file of kind anchor",
        }

        found = swept_twice(bucket, replace(SHORT, anchors=3))

        assert {one.path: one.why for one in found.damaged} == junk
        assert found.anchors == (4, 7, 10)

    def test_an_anchor_whose_header_lies_about_its_state_does_not_count(self, bucket: Clocked) -> None:
        real = run(bucket.get(anchor_path(bucket, 4)))
        before, after = commit_of(bucket, 4).after, commit_of(bucket, 9).after
        junk = add_shortcut(bucket, 9, real.replace(before.encode(), after.encode()))
        assert Delta.from_bytes(run(bucket.get(junk))).after == after

        found = swept_twice(bucket)

        assert [(one.path, one.why) for one in found.damaged] == [
            (junk, "its tensors do not have the state that it names")
        ]
        assert found.anchors == (7, 10)

    def test_a_good_anchor_counts_whatever_junk_is_beside_it(self, bucket: Clocked) -> None:
        for _ in range(5):
            add_shortcut(bucket, 10, os.urandom(100))

        found = swept_twice(bucket)

        assert found.anchors == (7, 10)
        assert bucket.versions("deltas") == [7, 8, 9, 10]

    def test_so_much_junk_that_it_is_not_read_stops_the_deletion(
        self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(anchor_check, "_MOST_DAMAGED", 5)
        for _ in range(20):
            add_shortcut(bucket, 9, os.urandom(100))

        found = swept_twice(bucket)

        assert len(found.damaged) == 5
        assert (found.below, found.removed) == (0, ())
        assert bucket.versions("deltas") == list(range(2, 11))


class TestDamage:
    def test_two_damaged_anchors_do_not_replace_older_data(self, bucket: Clocked) -> None:
        bad = [anchor_path(bucket, version) for version in (7, 10)]
        for path in bad:
            spoil(bucket, path)

        found = swept_twice(bucket)

        assert found.anchors == (1, 4)
        assert [(one.path, one.why) for one in found.damaged] == [
            (path, "corrupt: its hash does not match the record") for path in reversed(bad)
        ]
        assert bucket.versions("anchors") == [1, 4, 7, 10]
        assert bucket.versions("deltas") == list(range(2, 11))

    def test_damaged_anchors_stay_while_too_few_others_are_intact(self, bucket: Clocked) -> None:
        """Perhaps only the reading of 1, 4 and 7 failed."""
        for version in (1, 4, 7):
            spoil(bucket, anchor_path(bucket, version))

        found = swept_twice(bucket)

        assert found.anchors == (10,)
        assert bucket.versions("anchors") == [1, 4, 7, 10]
        assert found.limits[0].why == "damaged anchor, and too few others are intact"

    def test_gc_deletes_again_once_there_are_new_anchors(self, lived: Lived) -> None:
        bucket = lived.bucket
        for version in (7, 10):
            spoil(bucket, anchor_path(bucket, version))
        swept_twice(bucket)

        publish(bucket, stepped(lived.weights, 99), 6, every=HOUR, clock=bucket, anchor_every=2)
        found = swept_twice(bucket)

        assert found.damaged == ()
        assert min(bucket.versions("deltas")) == found.below > 10

    def test_a_dry_run_does_not_list_what_damaged_anchors_cannot_replace(self, bucket: Clocked) -> None:
        swept(bucket)
        bucket.now += HOUR + 1
        bucket.write("replicas/x", b"")  # a dry run takes its time from the newest object
        for version in (7, 10):
            spoil(bucket, anchor_path(bucket, version))

        found = swept(bucket, dry_run=True)

        assert found.removed == ()
        assert len(found.damaged) == 2

    def test_the_command_names_damaged_anchors(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        url = tmp_path_factory.mktemp("gc") / "run"
        publish(open_bucket(url), first_weights(), 5, anchor_every=1)
        newest = next((url / "anchors" / "5").iterdir())
        newest.write_bytes(bytes(newest.stat().st_size))

        ran = weightwire("gc", url, "--window", "0s", "--grace", "0s")

        assert ran.code == 0
        assert f"warning: anchors/5/{newest.name} does not count as an anchor: corrupt" in ran.err


class TestCost:
    def reads(self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        seen: list[str] = []
        inner = bucket.inner.read_into

        async def read_into(path: str, buffer: memoryview, start: int = 0) -> None:
            seen.append(path)
            await inner(path, buffer, start)

        monkeypatch.setattr(bucket.inner, "read_into", read_into)
        return seen

    def test_no_anchor_is_read_if_nothing_is_deleted(self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.reads(bucket, monkeypatch)
        swept(bucket)
        assert seen == []

    def test_only_anchors_to_keep_are_read_and_only_once(
        self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swept(bucket)
        seen = self.reads(bucket, monkeypatch)
        bucket.now += HOUR
        assert swept(bucket).removed
        assert sorted(seen) == [anchor_path(bucket, 10), anchor_path(bucket, 7)]

    def test_sweeps_of_one_process_remember_what_they_verified(
        self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        verified: VerifiedFiles = set()
        seen = self.reads(bucket, monkeypatch)
        retention = Retention(2, 0.0, 0.0)
        bucket.hidden |= {*bucket.paths("deltas/2/")}
        run(sweep(bucket, Runtime(), retention, verified=verified))
        assert len(seen) == 2
        bucket.hidden.clear()
        found = run(sweep(bucket, Runtime(), retention, verified=verified))
        assert found.removed
        assert len(seen) == 2

    def test_a_replaced_anchor_is_read_again(self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
        verified: VerifiedFiles = set()
        retention = Retention(2, 0.0, 0.0)
        bucket.hidden |= {*bucket.paths("deltas/2/")}
        run(sweep(bucket, Runtime(), retention, verified=verified))
        bucket.hidden.clear()
        bucket.now += 1
        path = anchor_path(bucket, 10)
        bucket.write(path, bytes(len(run(bucket.get(path)))))
        found = run(sweep(bucket, Runtime(), retention, verified=verified))
        assert [one.path for one in found.damaged] == [path]
        assert found.anchors == (7,)


def test_anchors_that_justify_a_deletion() -> None:
    commits = {version: version * HOUR for version in range(11)}
    assert relied_on(Retention(2, 0.0), 10 * HOUR, [1, 4, 7, 10], commits) == {7, 10}
    assert relied_on(Retention(1, 5 * HOUR), 10 * HOUR, [1, 4, 7, 10], commits) == {4, 10}
    assert relied_on(Retention(1, DAY), 10 * HOUR, [1, 4, 7, 10], commits) == {10}
