"""Records become drawable data: spans, histories and columns, even if the records are absurd."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.records import RUN_ID, a_run, chain_of, grow
from weightwire.chain.records import Commit, Heartbeat, PassedVersion, StageTiming
from weightwire.page.layers import HeatRow
from weightwire.page.run_view import (
    History,
    ReplicaView,
    RunView,
    StageSpan,
    column_of,
    heat_of,
    history_of,
    moment,
    replica_of,
    sampled,
    snapshot_of,
)

NOW = 1.7e9


def commits(count: int) -> list[Commit]:
    return [one.record for one in chain_of(count)]


def drawn(*fields: dict[str, Any]) -> RunView:
    """A run with a fence, an anchor, and one delta for each set of fields."""
    chain = chain_of(2)
    for one in fields:
        grow(chain, **one)
    return snapshot_of("memory://x", NOW, a_run(), [one.record for one in chain])


def beat(version: int, *recent: PassedVersion, **fields: Any) -> Heartbeat:
    given: dict[str, Any] = {
        "run": RUN_ID,
        "name": "one",
        "version": version,
        "head": version,
        "lease": 60.0,
        "recent": recent,
    }
    return Heartbeat(**given | fields)


def passed(version: int, **ends: float) -> PassedVersion:
    return PassedVersion(version, {name: StageTiming(0.25, 10, at) for name, at in ends.items()})


def replica(*beats: Heartbeat) -> ReplicaView:
    """The view after these heartbeats, in this order."""
    history: History = {}
    for one in beats:
        history = history_of(history, one)
    return replica_of(beats[-1], NOW, history)


class TestVersions:
    def test_a_version_has_the_fields_of_its_commit(self) -> None:
        snapshot = drawn({"time": NOW, "step": 7, "changed": 5, "metrics": {"reward": 0.5, "kl": None}})

        assert [one.kind for one in snapshot.versions] == ["fence", "anchor", "delta"]
        last = snapshot.versions[-1]
        assert (last.version, last.step, last.time, last.nbytes, last.changed) == (2, 7, NOW, 100, 5)
        assert last.metrics == {"reward": 0.5, "kl": None}
        assert (snapshot.nbytes, snapshot.parameters, snapshot.tensors, snapshot.older) == (64, 32, 1, 0)

    def test_a_run_without_versions_is_empty(self) -> None:
        snapshot = snapshot_of("memory://x", NOW, a_run(), [])
        assert (snapshot.versions, snapshot.spans, snapshot.heat.versions, snapshot.older) == ((), (), (), 0)

    @pytest.mark.parametrize("time", [0.0, -5.0, 1e300])
    def test_an_impossible_time_becomes_none(self, time: float) -> None:
        assert drawn({"time": time}).versions[-1].time is None
        assert moment(time) is None

    def test_a_metric_beyond_the_axis_range_becomes_none(self) -> None:
        metrics = {"a": 1e308, "b": -1e308, "c": -1e300, "d": float("nan")}
        assert drawn({"metrics": metrics}).versions[-1].metrics == {"a": None, "b": None, "c": -1e300, "d": None}

    def test_a_snapshot_encodes_as_json(self) -> None:
        decoded = msgspec.json.decode(msgspec.json.encode(drawn({"metrics": {"</script>": 1.0}})))
        assert decoded["versions"][-1]["metrics"] == {"</script>": 1.0}


class TestSpans:
    def test_spans_end_at_the_recorded_time(self) -> None:
        stages = {"encode": StageTiming(0.5, 10, NOW - 2), "upload": StageTiming(1.0, 20, NOW - 0.5)}
        assert drawn({"time": NOW, "stages": stages}).spans == (
            StageSpan("encode", 2, NOW - 2.5, 0.5, 10),
            StageSpan("upload", 2, NOW - 1.5, 1.0, 20),
        )

    def test_stages_without_an_end_time_are_chained_to_the_commit(self) -> None:
        stages = {"capture": StageTiming(0.25), "encode": StageTiming(0.5), "upload": StageTiming(1.0)}
        found = drawn({"time": NOW, "stages": stages}).spans
        assert [(one.stage, one.start) for one in found] == [
            ("capture", NOW - 1.75),
            ("encode", NOW - 1.5),
            ("upload", NOW - 1.0),
        ]

    @pytest.mark.parametrize(
        "stage",
        [StageTiming(-1.0, 0, NOW), StageTiming(1e300, 0, NOW), StageTiming(1.0, 0, 1e300), StageTiming(5.0, 0, 1.0)],
    )
    def test_impossible_durations_are_left_out(self, stage: StageTiming) -> None:
        assert drawn({"time": NOW, "stages": {"encode": stage}}).spans == ()

    def test_unknown_stages_are_left_out(self) -> None:
        assert drawn({"time": NOW, "stages": {"<b>": StageTiming(1.0, 0, NOW)}}).spans == ()

    def test_impossible_sizes_are_clamped(self) -> None:
        stages = {"encode": StageTiming(1.0, -3, NOW), "upload": StageTiming(1.0, 10**30, NOW)}
        assert [one.nbytes for one in drawn({"time": NOW, "stages": stages}).spans] == [0, 2**53 - 1]


class TestReplicas:
    def test_a_replica_has_the_fields_of_its_last_heartbeat(self) -> None:
        one = replica(beat(5, host="a", trouble="tired", served=4, stages={"swap": StageTiming(0.125)}))
        assert (one.name, one.host, one.version, one.reached, one.trouble) == ("one", "a", 5, 4, "tired")
        assert (one.heard, one.lease, one.pause) == (NOW, 60.0, 0.125)

    def test_a_stopped_replica_has_no_lease(self) -> None:
        assert replica(beat(5, lease=0.0)).lease == 0

    def test_history_becomes_spans_and_steps(self) -> None:
        one = replica(beat(5, passed(4, fetch=NOW, apply=NOW + 1), passed(5, fetch=NOW + 2, apply=NOW + 3)))
        assert [(span.version, span.stage, span.start) for span in one.spans] == [
            (4, "fetch", NOW - 0.25),
            (4, "apply", NOW + 0.75),
            (5, "fetch", NOW + 1.75),
            (5, "apply", NOW + 2.75),
        ]
        assert one.steps == ((NOW + 1, 4), (NOW + 3, 5))

    def test_a_step_is_a_swap_if_there_are_engines(self) -> None:
        both = passed(4, apply=NOW + 1), passed(5, apply=NOW + 2, swap=NOW + 4)
        assert replica(beat(5, *both, served=5)).steps == ((NOW + 4, 5),)

    def test_histories_of_heartbeats_are_joined(self) -> None:
        early = beat(5, passed(4, apply=NOW), passed(5, apply=NOW + 1))
        late = beat(7, passed(6, apply=NOW + 2), passed(7, apply=NOW + 3))
        assert [version for _, version in replica(early, late).steps] == [4, 5, 6, 7]

    def test_a_version_in_progress_is_not_counted_twice(self) -> None:
        begun, done = passed(5, apply=NOW), passed(5, apply=NOW, swap=NOW + 1)
        one = replica(beat(5, begun, served=4), beat(5, done, served=5))
        assert [span.stage for span in one.spans] == ["apply", "swap"]

    def test_a_restarted_replica_shows_a_version_twice(self) -> None:
        early = beat(5, passed(4, apply=NOW), passed(5, apply=NOW + 1))
        again = beat(5, passed(5, apply=NOW + 60))
        assert replica(early, again).steps == ((NOW, 4), (NOW + 1, 5), (NOW + 60, 5))

    def test_the_histories_of_a_large_fleet_are_shorter(self) -> None:
        one = beat(400, *(passed(version, fetch=NOW + version, apply=NOW + version) for version in range(400)))
        history = history_of({}, one)
        for among, spans, steps in ((1, 600, 400), (16, 600, 400), (160, 60, 200)):
            found = replica_of(one, NOW, history, among=among)
            assert (len(found.spans), len(found.steps)) == (spans, steps)
            assert found.steps[-1] == (NOW + 399, 399)

    def test_entries_without_a_time_are_left_out(self) -> None:
        one = replica(beat(5, passed(5, apply=0.0), PassedVersion(-3, {"apply": StageTiming(1.0, 0, NOW)})))
        assert (one.spans, one.steps) == ((), ())


class TestHeat:
    ROWS = (HeatRow("a", ("a.x", "a.y"), 10), HeatRow("b", ("b",), 4), HeatRow("none", (), 0))

    def test_a_column_is_the_fraction_that_changed(self) -> None:
        assert column_of(self.ROWS, {"a.x": 1, "a.y": 2, "b": 4, "unknown": 9}) == (0.3, 1.0, 0.0)

    def test_a_version_without_a_column_is_a_gap(self) -> None:
        heat = heat_of(commits(4), self.ROWS, {2: (0.1, 0.2, 0.0)})
        assert (heat.rows, heat.versions, heat.every) == (("a", "b", "none"), (0, 1, 2, 3), 1)
        assert heat.columns == (None, None, (0.1, 0.2, 0.0), None)

    @pytest.mark.parametrize(("count", "every"), [(1, 1), (200, 1), (201, 2), (400, 2), (401, 4)])
    def test_many_versions_are_sampled(self, count: int, every: int) -> None:
        found, versions = sampled(commits(count))
        assert (found, len(versions) <= 200) == (every, True)

    def test_sampled_versions_stay_valid_as_the_run_grows(self) -> None:
        assert set(sampled(commits(300))[1]) <= set(sampled(commits(200))[1]) | set(range(200, 300))
