"""A reader finds a run in its bucket, and requests only what is new."""

from __future__ import annotations

import pytest

from support.clocked_bucket import Clocked, beat, clocked, first_weights, publish, run, stepped
from support.run_contents import commits_in
from support.stores import SeaweedFS, use
from weightwire.bucket.registry import open_bucket
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import gc_path
from weightwire.chain.records import Gc, PassedVersion, StageTiming, seal
from weightwire.chain.writer import Signer
from weightwire.delta.file import Delta
from weightwire.errors import BrokenChain, NoRun, PermissionDenied, Unavailable
from weightwire.page.run_reader import RunReader
from weightwire.page.run_view import RunView
from weightwire.system.runtime import Runtime
from weightwire.upkeep.key_change import change_keys


class Later(Runtime):
    """A runtime whose clock the test sets."""

    now = 0.0

    def clock(self) -> float:
        return self.now


@pytest.fixture
def bucket() -> Clocked:
    """Versions 0 to 6; 1, 3 and 5 have anchors."""
    bucket = clocked()
    publish(bucket, first_weights(), 6, anchor_every=2)
    return bucket


def look(bucket: Clocked) -> RunView:
    return run(RunReader(bucket, Runtime()).look())


def asked(bucket: Clocked) -> list[tuple[str, str]]:
    """A log of all reads from now on."""
    log: list[tuple[str, str]] = []

    async def note(verb: str, path: str) -> None:
        log.append((verb, path))

    bucket.hook = note
    return log


class TestSnapshot:
    def test_versions_come_from_commits(self, bucket: Clocked) -> None:
        snapshot = look(bucket)
        commits = commits_in(bucket)
        assert [(one.version, one.kind, one.nbytes, one.changed) for one in snapshot.versions] == [
            (one.version, one.kind, one.nbytes, one.changed) for one in commits
        ]
        assert [one.metrics for one in snapshot.versions[1:]] == [one.metrics for one in commits[1:]]
        assert snapshot.publisher is not None
        assert snapshot.publisher.epoch == 1
        assert {span.stage for span in snapshot.spans} == {"encode", "upload"}

    def test_keys_are_those_that_may_sign_the_next_version(self) -> None:
        old, new = PrivateKey.generate(), PrivateKey.generate()
        bucket = clocked()
        publish(bucket, first_weights(), 2, key=old)
        reader = RunReader(bucket, Runtime())
        assert run(reader.look()).keys == (old.public.short,)
        run(
            change_keys(bucket, Runtime(), Signer(old), frozenset({new.public.hex}), frozenset({old.public.hex}), print)
        )
        assert run(reader.look()).keys == look(bucket).keys == (new.public.short,)

    def test_a_run_that_is_not_signed_has_no_keys(self, bucket: Clocked) -> None:
        assert look(bucket).keys == ()

    def test_heat_map_comes_from_deltas(self, bucket: Clocked) -> None:
        heat = look(bucket).heat
        assert (heat.rows, heat.parameters) == (("a", "b"), (512, 40))
        for version, column in zip(heat.versions, heat.columns, strict=True):
            commit = commits_in(bucket)[version]
            if commit.kind != "delta":
                assert column is None
                continue
            delta = Delta.from_bytes(run(bucket.get(commit.files[0].path)))
            changed = delta.entries["a.weight"].changed
            assert column is not None
            assert list(column) == pytest.approx([changed / 512, 0.0], rel=1e-5)

    def test_an_anchor_without_data_is_marked(self, bucket: Clocked) -> None:
        run(bucket.inner.delete(bucket.paths("anchors/3/")[0]))
        assert [(one.version, one.there) for one in look(bucket).anchors] == [(3, False), (5, True)]

    def test_a_deleted_delta_is_a_gap(self, bucket: Clocked) -> None:
        ours = look(bucket).run
        run(bucket.inner.delete(bucket.paths("deltas/2/")[0]))
        bucket.write(gc_path(3), seal(Gc(run=ours, below=3)).data)
        snapshot = look(bucket)
        assert snapshot.below == 3
        assert [version for version, one in zip(snapshot.heat.versions, snapshot.heat.columns, strict=True) if one] == [
            3,
            4,
            5,
            6,
        ]

    @pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 4000])
    def test_a_damaged_delta_is_a_gap(self, bucket: Clocked, data: bytes) -> None:
        bucket.write(bucket.paths("deltas/4/")[0], data)
        assert [one is None for one in look(bucket).heat.columns] == [True, True, False, False, True, False, False]

    def test_only_valid_heartbeats_become_replicas(self, bucket: Clocked) -> None:
        ours = look(bucket).run
        bucket.write(*beat(ours, "b", 6))
        bucket.write(*beat(ours, "a", 3, trouble="<script>"))
        bucket.write("replicas/<script>.json", beat(ours, "c", 3)[1])
        bucket.write("replicas/d.json", b"nonsense")
        found = look(bucket).replicas
        assert [(one.name, one.reached, one.trouble) for one in found] == [("a", 3, "<script>"), ("b", 6, "")]

    def test_only_the_newest_heartbeats_are_read(self, bucket: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("weightwire.page.run_reader._REPLICAS", 24)
        ours = look(bucket).run
        for index in range(30):
            bucket.now += 1
            bucket.write(*beat(ours, f"r{index:02}", 6))
        log = asked(bucket)
        snapshot = look(bucket)
        shown = [f"r{one:02}" for one in range(6, 30)]
        assert ([one.name for one in snapshot.replicas], snapshot.unshown) == (shown, 6)
        assert {path for verb, path in log if path.startswith("replicas/") and verb == "get"} == {
            f"replicas/{name}.json" for name in shown
        }

    def test_an_empty_bucket_has_no_run(self) -> None:
        snapshot = look(clocked())
        assert (snapshot.run, snapshot.versions) == ("", ())

    def test_a_run_without_versions_is_shown_empty(self, bucket: Clocked) -> None:
        for path in bucket.paths("commits/"):
            run(bucket.inner.delete(path))
        snapshot = look(bucket)
        assert (snapshot.run != "", snapshot.versions, snapshot.heat.columns) == (True, (), ())

    def test_reading_writes_nothing(self, bucket: Clocked) -> None:
        bucket.read_only = True
        look(bucket)

    def test_a_key_without_list_permission_gets_a_note(self, bucket: Clocked) -> None:
        async def refuse(verb: str, path: str) -> None:
            if verb == "list":
                raise PermissionDenied(f"{path}: no")

        bucket.hook = refuse
        snapshot = look(bucket)
        assert (len(snapshot.versions), snapshot.anchors, snapshot.replicas) == (7, (), ())
        assert "no list permission" in snapshot.notes[0]


class TestSecondLook:
    def test_a_second_look_reads_only_new_records(self, bucket: Clocked) -> None:
        reader, weights = RunReader(bucket, Runtime()), stepped(first_weights(), 9)
        before = run(reader.look())
        log = asked(bucket)
        assert run(reader.look()).versions == before.versions
        assert log == [("find", "run.json"), ("get", "commits/00000000000000000007.json"), ("list", "replicas/")]

        bucket.hook = None
        publish(bucket, weights, 1)
        log = asked(bucket)
        after = run(reader.look())

        assert [one.version for one in after.versions] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert {path for verb, path in log if verb == "get"} <= {
            f"commits/{version:020}.json" for version in (7, 8, 9, 10, 11)
        }

    def test_a_changed_heartbeat_is_read_again(self, bucket: Clocked) -> None:
        reader = RunReader(bucket, Runtime())
        ours = run(reader.look()).run
        for version in (3, 5):
            bucket.now += 1
            bucket.write(*beat(ours, "one", version))
            assert run(reader.look()).replicas[0].reached == version

    def test_the_history_of_a_deleted_replica_is_forgotten(self, bucket: Clocked) -> None:
        reader = RunReader(bucket, Runtime())
        ours = run(reader.look()).run
        for at in (5.0, 6.0):
            path, data = beat(ours, "one", 3, recent=(PassedVersion(3, {"apply": StageTiming(0.1, 0, at)}),))
            bucket.write(path, data)
            assert [at for at, _ in run(reader.look()).replicas[0].steps] == [at]
            run(bucket.inner.delete(path))
            assert run(reader.look()).replicas == ()

    def test_anchors_are_listed_again_after_a_while(self, bucket: Clocked) -> None:
        runtime = Later()
        reader = RunReader(bucket, runtime)
        run(reader.look())
        run(bucket.inner.delete(bucket.paths("anchors/5/")[0]))
        assert run(reader.look()).anchors[-1].there
        runtime.now += 60
        assert not run(reader.look()).anchors[-1].there

    def test_a_new_run_replaces_a_deleted_one(self, bucket: Clocked) -> None:
        reader = RunReader(bucket, Runtime())
        first = run(reader.look())
        for path in bucket.paths():
            run(bucket.inner.delete(path))
        for _ in range(2):
            with pytest.raises(NoRun, match="the run was deleted"):
                run(reader.look())
        bucket.now += 5
        publish(bucket, first_weights(3), 2)
        second = run(reader.look())
        assert (second.run != first.run, len(second.versions)) == (True, 3)

    def test_reading_continues_after_an_outage(self, bucket: Clocked) -> None:
        reader = RunReader(bucket, Runtime())
        before = run(reader.look())

        async def fail(verb: str, path: str) -> None:
            raise Unavailable("no route")

        bucket.hook = fail
        with pytest.raises(Unavailable):
            run(reader.look())
        bucket.hook = None
        assert run(reader.look()).versions == before.versions

    def test_a_broken_run_that_is_then_deleted_has_no_run(self, bucket: Clocked) -> None:
        """A deletion in progress looks like this."""
        reader = RunReader(bucket, Runtime())
        run(reader.look())
        bucket.write("commits/00000000000000000007.json", b"{}")
        with pytest.raises(BrokenChain):
            run(reader.look())
        run(bucket.inner.delete("run.json"))
        with pytest.raises(NoRun):
            run(reader.look())

    def test_a_broken_chain_is_an_error(self, bucket: Clocked) -> None:
        bucket.write("commits/00000000000000000004.json", b"{}")
        with pytest.raises(BrokenChain):
            look(bucket)


def test_a_read_only_s3_key_can_read_the_page(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, seaweedfs.env)
    url = seaweedfs.url("page/run")
    publish(open_bucket(url), first_weights(), 4, anchor_every=2)
    use(monkeypatch, seaweedfs.env_of("reader"))

    snapshot = run(RunReader(open_bucket(url), Runtime()).look())

    assert [one.kind for one in snapshot.versions] == ["fence", "anchor", "delta", "delta", "delta"]
    assert [one is not None for one in snapshot.heat.columns] == [False, False, True, True, True]
    assert [one.version for one in snapshot.anchors] == [3]
