"""From records to what can be drawn: spans, histories, columns, whatever the records say."""

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
    picture_of,
    replica_of,
    sampled,
)

NOW = 1.7e9


def commits(count: int) -> list[Commit]:
    return [one.record for one in chain_of(count)]


def drawn(*fields: dict[str, Any]) -> RunView:
    """A run of a fence, an anchor, and a delta with each of these fields."""
    chain = chain_of(2)
    for one in fields:
        grow(chain, **one)
    return picture_of("memory://x", NOW, a_run(), [one.record for one in chain])


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
    """As seen by one who heard all of these, one after the other."""
    history: History = {}
    for one in beats:
        history = history_of(history, one)
    return replica_of(beats[-1], NOW, history)


class TestVersions:
    def test_as_their_commits_tell(self) -> None:
        picture = drawn({"time": NOW, "step": 7, "changed": 5, "metrics": {"reward": 0.5, "kl": None}})

        assert [one.kind for one in picture.versions] == ["fence", "anchor", "delta"]
        last = picture.versions[-1]
        assert (last.version, last.step, last.time, last.nbytes, last.changed) == (2, 7, NOW, 100, 5)
        assert last.metrics == {"reward": 0.5, "kl": None}
        assert (picture.nbytes, picture.parameters, picture.tensors, picture.older) == (64, 32, 1, 0)

    def test_of_a_run_without_any(self) -> None:
        picture = picture_of("memory://x", NOW, a_run(), [])
        assert (picture.versions, picture.spans, picture.heat.versions, picture.older) == ((), (), (), 0)

    @pytest.mark.parametrize("time", [0.0, -5.0, 1e300])
    def test_a_clock_without_sense_is_no_time(self, time: float) -> None:
        assert drawn({"time": time}).versions[-1].time is None
        assert moment(time) is None

    def test_a_metric_that_no_axis_can_hold_is_left_out(self) -> None:
        metrics = {"a": 1e308, "b": -1e308, "c": -1e300, "d": float("nan")}
        assert drawn({"metrics": metrics}).versions[-1].metrics == {"a": None, "b": None, "c": -1e300, "d": None}

    def test_can_be_told_in_json(self) -> None:
        told = msgspec.json.decode(msgspec.json.encode(drawn({"metrics": {"</script>": 1.0}})))
        assert told["versions"][-1]["metrics"] == {"</script>": 1.0}


class TestSpans:
    def test_end_when_their_stage_did(self) -> None:
        stages = {"encode": StageTiming(0.5, 10, NOW - 2), "upload": StageTiming(1.0, 20, NOW - 0.5)}
        assert drawn({"time": NOW, "stages": stages}).spans == (
            StageSpan("encode", 2, NOW - 2.5, 0.5, 10),
            StageSpan("upload", 2, NOW - 1.5, 1.0, 20),
        )

    def test_of_stages_that_do_not_say_when_they_ended(self) -> None:
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
    def test_not_of_numbers_without_sense(self, stage: StageTiming) -> None:
        assert drawn({"time": NOW, "stages": {"encode": stage}}).spans == ()

    def test_not_of_stages_that_nobody_knows(self) -> None:
        assert drawn({"time": NOW, "stages": {"<b>": StageTiming(1.0, 0, NOW)}}).spans == ()

    def test_a_size_without_sense_is_bounded(self) -> None:
        stages = {"encode": StageTiming(1.0, -3, NOW), "upload": StageTiming(1.0, 10**30, NOW)}
        assert [one.nbytes for one in drawn({"time": NOW, "stages": stages}).spans] == [0, 2**53 - 1]


class TestReplicas:
    def test_what_the_last_heartbeat_says(self) -> None:
        one = replica(beat(5, host="a", trouble="tired", served=4, stages={"swap": StageTiming(0.125)}))
        assert (one.name, one.host, one.version, one.reached, one.trouble) == ("one", "a", 5, 4, "tired")
        assert (one.heard, one.lease, one.pause) == (NOW, 60.0, 0.125)

    def test_one_that_was_stopped_has_no_lease(self) -> None:
        assert replica(beat(5, lease=0.0)).lease == 0

    def test_what_it_went_through(self) -> None:
        one = replica(beat(5, passed(4, fetch=NOW, apply=NOW + 1), passed(5, fetch=NOW + 2, apply=NOW + 3)))
        assert [(span.version, span.stage, span.start) for span in one.spans] == [
            (4, "fetch", NOW - 0.25),
            (4, "apply", NOW + 0.75),
            (5, "fetch", NOW + 1.75),
            (5, "apply", NOW + 2.75),
        ]
        assert one.steps == ((NOW + 1, 4), (NOW + 3, 5))

    def test_with_engines_it_has_reached_what_they_serve(self) -> None:
        both = passed(4, apply=NOW + 1), passed(5, apply=NOW + 2, swap=NOW + 4)
        assert replica(beat(5, *both, served=5)).steps == ((NOW + 4, 5),)

    def test_heartbeats_add_up(self) -> None:
        early = beat(5, passed(4, apply=NOW), passed(5, apply=NOW + 1))
        late = beat(7, passed(6, apply=NOW + 2), passed(7, apply=NOW + 3))
        assert [version for _, version in replica(early, late).steps] == [4, 5, 6, 7]

    def test_a_version_that_goes_on_is_one(self) -> None:
        begun, done = passed(5, apply=NOW), passed(5, apply=NOW, swap=NOW + 1)
        one = replica(beat(5, begun, served=4), beat(5, done, served=5))
        assert [span.stage for span in one.spans] == ["apply", "swap"]

    def test_one_that_starts_again_goes_through_a_version_twice(self) -> None:
        early = beat(5, passed(4, apply=NOW), passed(5, apply=NOW + 1))
        again = beat(5, passed(5, apply=NOW + 60))
        assert replica(early, again).steps == ((NOW, 4), (NOW + 1, 5), (NOW + 60, 5))

    def test_nothing_without_a_time(self) -> None:
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
    def test_of_many_versions_some_are_shown(self, count: int, every: int) -> None:
        found, versions = sampled(commits(count))
        assert (found, len(versions) <= 200) == (every, True)

    def test_those_shown_stay_the_same_as_the_run_grows(self) -> None:
        assert set(sampled(commits(300))[1]) <= set(sampled(commits(200))[1]) | set(range(200, 300))
