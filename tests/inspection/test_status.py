"""The status and the history of a run."""

from __future__ import annotations

import platform

import msgspec
import pytest

from support.clocked_bucket import HOUR, Clocked, beat, clocked, copied, first_weights, publish, run, stepped
from weightwire.chain.record_paths import commit_path, epoch_path, gc_path
from weightwire.chain.records import Epoch, Gc, Shortcut, seal, shortcut_path, unseal
from weightwire.errors import BrokenChain, NoRun
from weightwire.inspection.status import DeltaSizes, RunStatus, VersionStatus, WeightsSize, read_history, read_status
from weightwire.system.runtime import Runtime


class Now(Runtime):
    """A runtime with the clock of a bucket, optionally wrong by some seconds."""

    def __init__(self, bucket: Clocked, wrong: float = 0.0) -> None:
        super().__init__()
        self._bucket, self._wrong = bucket, wrong

    def time(self) -> float:
        return self._bucket.now + self._wrong


@pytest.fixture
def bucket(ten_versions: Clocked) -> Clocked:
    """Versions 0 to 9: 0, 6 and 8 are fences. The newest anchor is 7."""
    return copied(ten_versions)


@pytest.fixture(scope="module")
def ten_versions() -> Clocked:
    """Tests must not change it."""
    bucket = clocked()
    weights = publish(bucket, first_weights(), 5, every=HOUR, clock=bucket, anchor_every=3)
    publish(bucket, stepped(weights, 9), 1, every=HOUR, clock=bucket, anchor_every=1)
    publish(bucket, stepped(weights, 9), 1, every=HOUR, clock=bucket, anchor_every=100)
    return bucket


def reported(bucket: Clocked, wrong: float = 0.0) -> RunStatus:
    return run(read_status(bucket, Now(bucket, wrong)))


class TestStatus:
    def test_status_has_weights_newest_version_and_publisher(self, bucket: Clocked) -> None:
        bucket.now += 90
        found = reported(bucket)

        assert (found.url, found.rights.mode) == (bucket.url, "strict")
        assert found.weights == WeightsSize(2, 32 * 16 + 40, 32 * 16 * 4 + 40 * 2)
        assert found.head is not None
        assert (found.head.version, found.head.kind, found.head.step) == (9, "delta", 0)
        assert found.age == 90
        assert found.publisher is not None
        assert (found.publisher.epoch, found.publisher.host) == (3, platform.node())
        assert found.below == 0
        assert found.replicas == ()

    def test_delta_sizes_are_averaged(self, bucket: Clocked) -> None:
        found = reported(bucket)
        sizes = [one.size for one in run(bucket.list("deltas/"))]
        nothing_changed = 1  # version 9, a delta without a file
        assert found.deltas.recent == len(sizes) + nothing_changed
        average = sum(sizes) / found.deltas.recent
        assert found.deltas.average == pytest.approx(average)
        assert found.deltas.ratio == pytest.approx(found.weights.nbytes / average)

    def test_status_of_a_run_without_versions_has_no_newest_version(self) -> None:
        bucket = clocked()
        publish(bucket, first_weights(), 1)
        for path in bucket.paths():
            if path != "run.json":
                run(bucket.inner.delete(path))

        found = reported(bucket)

        assert (found.head, found.age, found.publisher, found.anchor) == (None, None, None, None)
        assert found.deltas == DeltaSizes(0, None, None)

    @pytest.mark.parametrize("version", [2, 7, 8])
    def test_missing_commit_is_reported_and_the_rest_is_shown(self, bucket: Clocked, version: int) -> None:
        run(bucket.inner.delete(commit_path(version)))
        warnings: list[str] = []
        found = run(read_status(bucket, Now(bucket), warnings.append))

        [warning] = warnings
        assert warning.startswith(f"{bucket.url}/{commit_path(version)}: ")
        assert found.head is not None
        assert found.head.version == 9
        with pytest.raises(BrokenChain):
            reported(bucket)

    def test_damaged_newest_commit_is_an_error(self, bucket: Clocked) -> None:
        bucket.write(commit_path(9), b"damaged")
        with pytest.raises(BrokenChain):
            run(read_status(bucket, Now(bucket), pytest.fail))

    def test_empty_bucket_has_no_run(self) -> None:
        with pytest.raises(NoRun):
            reported(clocked())

    def test_status_shows_single_writer_mode(self) -> None:
        bucket = clocked()
        bucket.strict = False
        publish(bucket, first_weights(), 1)
        assert reported(bucket).rights.mode == "single-writer"

    def test_status_writes_nothing(self, bucket: Clocked) -> None:
        bucket.read_only = True
        reported(bucket)

    def test_newest_valid_gc_record_counts(self, bucket: Clocked) -> None:
        ours = reported(bucket).run
        for number, name in ((2, ours), (4, ours), (6, "0" * 32)):
            bucket.write(gc_path(number), seal(Gc(run=name, below=number)).data)
        bucket.write(gc_path(7), seal(Gc(run=ours, below=8)).data)
        assert reported(bucket).below == 0  # announced, but nothing is deleted yet

        for path in [
            one.path
            for version in (1, 2, 3)
            for kind in ("deltas", "anchors")
            for one in run(bucket.list(f"{kind}/{version}/"))
        ]:
            run(bucket.inner.delete(path))
        assert reported(bucket).below == 4

    def test_newest_valid_epoch_counts(self, bucket: Clocked) -> None:
        ours = reported(bucket).run
        bucket.write(epoch_path(8), seal(Epoch(run=ours, epoch=8, write_id="0" * 32, time=5, host="new")).data)
        bucket.write(epoch_path(9), b"nonsense")
        found = reported(bucket).publisher
        assert found is not None
        assert (found.epoch, found.host, found.time) == (8, "new", 5)


class TestAnchor:
    def test_status_names_the_newest_anchor(self, bucket: Clocked) -> None:
        found = reported(bucket).anchor
        assert found is not None
        assert (found.version, found.nbytes) == (7, run(bucket.list("anchors/7/"))[0].size)

    def test_anchor_without_data_is_ignored(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/7/")[0]))
        found = reported(bucket).anchor
        assert found is not None
        assert found.version == 4

    def test_anchor_without_one_part_is_ignored(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/7/")[0]))
        bucket.write("anchors/7/e2-r1-0123456789abcdef.safetensors", b"the other part")
        found = reported(bucket).anchor
        assert found is not None
        assert found.version == 4

    def test_anchor_of_another_state_is_ignored(self, bucket: Clocked) -> None:
        path = bucket.paths("shortcuts/7/")[0]
        wrong = msgspec.structs.replace(unseal(run(bucket.get(path)), Shortcut, "").record, after="0" * 64)
        run(bucket.inner.delete(path))
        bucket.write(shortcut_path(seal(wrong)), seal(wrong).data)
        found = reported(bucket).anchor
        assert found is not None
        assert found.version == 4

    def test_unfinished_upload_is_ignored(self, bucket: Clocked) -> None:
        bucket.write("anchors/8/e3-r0-0123456789abcdef.safetensors", b"half")
        bucket.write("anchors/99/e3-r0-0123456789abcdef.safetensors", b"half")
        found = reported(bucket).anchor
        assert found is not None
        assert found.version == 7

    def test_first_version_is_an_anchor(self) -> None:
        bucket = clocked()
        publish(bucket, first_weights(), 2)
        found = reported(bucket).anchor
        assert found is not None
        assert found.version == 1

    def test_run_with_only_a_base_has_no_anchor(self) -> None:
        bucket = clocked()
        publish(bucket, first_weights(), 2, base=first_weights(), anchor_every=100)
        assert reported(bucket).anchor is None


class TestReplicas:
    def test_replicas_have_their_lag_in_versions(self, bucket: Clocked) -> None:
        ours = reported(bucket).run
        bucket.write(*beat(ours, "old", 3))
        bucket.now += 70
        bucket.write(*beat(ours, "new", 9, host="b", trouble="tired"))
        bucket.now += 20

        new, old = reported(bucket).replicas

        assert (new.name, new.version, new.behind, new.seen, new.alive) == ("new", 9, 0, 20, True)
        assert (new.host, new.trouble, new.stages["apply"].seconds) == ("b", "tired", 0.01)
        # Its heartbeat says that it is up to date, but the heartbeat is old.
        assert (old.name, old.version, old.behind, old.seen, old.alive) == ("old", 3, 6, 90, False)

    def test_engine_without_a_version_has_no_lag(self, bucket: Clocked) -> None:
        bucket.write(*beat(reported(bucket).run, "x", 9, served=-1))
        [found] = reported(bucket).replicas
        assert found.behind is None

    def test_stopped_replica_is_not_alive(self, bucket: Clocked) -> None:
        bucket.write(*beat(reported(bucket).run, "x", 9, lease=0.0))
        [found] = reported(bucket).replicas
        assert (found.stopped, found.alive) == (True, False)

    def test_killed_replica_is_neither_alive_nor_stopped(self, bucket: Clocked) -> None:
        bucket.write(*beat(reported(bucket).run, "x", 9))
        bucket.now += HOUR
        [found] = reported(bucket).replicas
        assert (found.stopped, found.alive) == (False, False)

    def test_lease_lasts_a_day_at_most(self, bucket: Clocked) -> None:
        """As in retention, even if the heartbeat asks for more."""
        bucket.write(*beat(reported(bucket).run, "x", 9, lease=1e9))
        bucket.now += 23 * HOUR
        assert reported(bucket).replicas[0].alive
        bucket.now += HOUR
        assert not reported(bucket).replicas[0].alive

    def test_replica_without_a_version_is_listed(self, bucket: Clocked) -> None:
        bucket.write(*beat(reported(bucket).run, "empty", -1))
        assert reported(bucket).replicas[0].version == -1

    @pytest.mark.parametrize("data", [b"", b"nonsense", b'{"format": "weightwire/2"}'])
    def test_malformed_heartbeat_is_ignored(self, bucket: Clocked, data: bytes) -> None:
        bucket.write("replicas/x.json", data)
        assert reported(bucket).replicas == ()

    def test_heartbeat_of_another_run_is_ignored(self, bucket: Clocked) -> None:
        bucket.write(*beat("0" * 32, "x", 3))
        assert reported(bucket).replicas == ()

    def test_heartbeat_under_another_name_is_ignored(self, bucket: Clocked) -> None:
        _, data = beat(reported(bucket).run, "x", 3)
        bucket.write("replicas/y.json", data)
        assert reported(bucket).replicas == ()

    def test_slow_clock_does_not_show_negative_ages(self, bucket: Clocked) -> None:
        """The clock of this machine is an hour behind."""
        bucket.write(*beat(reported(bucket).run, "x", 3))
        found = reported(bucket, wrong=-HOUR)
        assert (found.replicas[0].seen, found.replicas[0].alive, found.age) == (0, True, 0)


class TestHistory:
    def test_history_lists_the_newest_version_first(self, bucket: Clocked) -> None:
        found = run(read_history(bucket, 5)).versions

        assert [(one.version, one.kind, one.step, one.epoch) for one in found] == [
            (9, "delta", 0, 3),
            (8, "fence", None, 3),
            (7, "delta", 0, 2),
            (6, "fence", None, 2),
            (5, "delta", 4, 1),
        ]
        assert found[4].metrics == {"reward": 2.0}
        assert found[4].nbytes == run(bucket.list("deltas/5/"))[0].size == found[4].stages["upload"].bytes
        assert found[4].changed == 11
        assert found[0].time > found[4].time

    @pytest.mark.parametrize(("last", "count"), [(0, 0), (1, 1), (10, 10), (11, 10), (1000, 10)])
    def test_history_has_a_limited_length(self, bucket: Clocked, last: int, count: int) -> None:
        assert [one.version for one in run(read_history(bucket, last)).versions] == list(range(9, 9 - count, -1))

    def test_run_without_versions_has_no_history(self) -> None:
        bucket = clocked()
        publish(bucket, first_weights(), 1)
        for version in (0, 1):
            run(bucket.inner.delete(commit_path(version)))
        assert run(read_history(bucket, 5)).versions == ()

    def test_edited_commit_is_an_error(self, bucket: Clocked) -> None:
        data = run(bucket.get(commit_path(7)))
        bucket.write(commit_path(7), data.replace(b'"reward":0.0', b'"reward":9.0'))
        with pytest.raises(BrokenChain, match=f"{8:020d}"):
            run(read_history(bucket, 5))
        assert len(run(read_history(bucket, 2)).versions) == 2

    def test_missing_commit_is_an_error(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(commit_path(7)))
        with pytest.raises(BrokenChain, match=f"{7:020d}"):
            run(read_history(bucket, 5))

    def test_history_agrees_with_the_status(self, bucket: Clocked) -> None:
        assert reported(bucket).head == run(read_history(bucket, 1)).versions[0]
        assert isinstance(reported(bucket).head, VersionStatus)
