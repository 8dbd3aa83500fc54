"""What the monitor makes of checks and updates: problems, versions, and what must be verified."""

from __future__ import annotations

from typing import Any, cast

import pytest

from weightwire.engines import engine_monitor
from weightwire.engines.engine import EngineHealth
from weightwire.engines.engine_monitor import EngineMonitor, EngineStatus
from weightwire.errors import EngineError, EngineGone
from weightwire.telemetry.events import Event

GONE = EngineGone("engine: does not answer")
RESTARTED = "engine: does not report version 3 any more"
ASLEEP = "engine: is asleep, or was paused by another program"


class Checked:
    """An engine that answers checks as the test says."""

    name = "engine"

    def __init__(self) -> None:
        self.health: EngineHealth | Exception = EngineHealth(3)

    def check_health(self) -> EngineHealth:
        if isinstance(self.health, Exception):
            raise self.health
        return self.health


class Scene:
    def __init__(self) -> None:
        self.checked = Checked()
        self.engine = cast(Any, self.checked)
        self.events: list[Event] = []
        self.changes = 0
        self.monitor = EngineMonitor([self.engine], self.events.append, self._change)
        self.monitor.begin(self.engine)
        self.monitor.end(self.engine, 3, None)

    def _change(self) -> None:
        self.changes += 1

    def check(self, health: EngineHealth | Exception) -> EngineStatus:
        self.checked.health = health
        self.monitor.check_now()
        [status] = self.monitor.statuses()
        return status

    def messages(self) -> list[tuple[str, str]]:
        return [(event.stage, event.message.partition("\n")[0]) for event in self.events]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_healthy_engine_serves_its_version_without_trouble(scene: Scene) -> None:
    assert scene.check(EngineHealth(3)) == EngineStatus("engine", 3)
    assert (scene.events, scene.changes) == ([], 0)


def test_each_problem_is_reported_once_and_its_end_as_well(scene: Scene) -> None:
    for _ in range(3):
        assert scene.check(GONE) == EngineStatus("engine", 3, trouble="engine: does not answer")
    assert scene.monitor.is_gone(scene.engine)
    assert not scene.monitor.can_be_updated(scene.engine)
    assert scene.check(EngineHealth(3)).trouble == ""
    assert scene.messages() == [("warning", "engine: does not answer"), ("recovered", "recovered: engine")]
    assert scene.changes == 2


def test_engine_that_is_gone_is_not_reported_again_by_its_update(scene: Scene) -> None:
    scene.check(GONE)
    scene.monitor.begin(scene.engine)
    scene.monitor.end(scene.engine, 3, EngineGone("engine: does not answer within 30 s"))
    assert scene.messages() == [("warning", "engine: does not answer")]
    assert scene.check(EngineHealth(3)).trouble == "engine: does not answer within 30 s"
    scene.monitor.begin(scene.engine)
    scene.monitor.end(scene.engine, 3, None)
    assert scene.messages()[-1] == ("recovered", "recovered: engine")


def test_first_contact_in_vain_does_not_end_a_problem(scene: Scene) -> None:
    scene.monitor.begin(scene.engine)
    scene.check(GONE)
    scene.monitor.end(scene.engine, None, None)  # `connect`, which waits for the checks to find the engine
    assert scene.messages() == [("warning", "engine: does not answer")]


def test_bug_in_a_check_is_a_problem(scene: Scene) -> None:
    assert scene.check(ZeroDivisionError("oh")).trouble == "engine: ZeroDivisionError: oh"


@pytest.mark.parametrize("version", [None, 2])
def test_engine_that_reports_another_version_serves_an_unknown_one(scene: Scene, version: int | None) -> None:
    assert scene.check(EngineHealth(version)) == EngineStatus("engine", None, trouble=RESTARTED)
    assert scene.check(EngineHealth(version)).trouble == RESTARTED  # until it is updated
    scene.monitor.begin(scene.engine)
    scene.monitor.end(scene.engine, 3, None)
    assert scene.check(EngineHealth(3)) == EngineStatus("engine", 3)


def test_sleeping_engine_must_be_verified_when_it_wakes_up(scene: Scene) -> None:
    assert scene.check(EngineHealth(is_asleep=True)).trouble == ASLEEP
    assert not scene.monitor.can_be_updated(scene.engine)
    assert "not verified yet" in scene.check(EngineHealth(3)).trouble
    assert scene.monitor.can_be_updated(scene.engine)
    assert scene.monitor.must_verify(scene.engine)
    scene.monitor.begin(scene.engine)
    assert scene.monitor.must_verify(scene.engine)
    scene.monitor.end(scene.engine, 3, EngineError("engine: cannot be verified"))
    assert scene.monitor.must_verify(scene.engine)
    scene.monitor.end(scene.engine, 3, None)
    assert not scene.monitor.must_verify(scene.engine)
    assert scene.check(EngineHealth(3)) == EngineStatus("engine", 3)


@pytest.mark.parametrize("health", [EngineHealth(is_asleep=True), EngineHealth(is_stuck=True), EngineHealth(4)])
def test_check_during_an_update_is_not_trouble(
    scene: Scene, health: EngineHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "_LONG_PAUSE", 600.0)
    scene.monitor.begin(scene.engine)
    assert scene.check(health) == EngineStatus("engine", 3)
    scene.monitor.end(scene.engine, 3, None)
    assert not scene.monitor.must_verify(scene.engine)
    assert scene.events == []


def test_long_pause_for_an_update_is_shown(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_monitor, "_LONG_PAUSE", 0.0)
    scene.monitor.begin(scene.engine)
    assert scene.check(EngineHealth(is_asleep=True)).paused_for > 0
    scene.monitor.end(scene.engine, 3, None)
    assert scene.check(EngineHealth(3)).paused_for == 0


def test_engine_that_an_update_left_paused_can_be_updated(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a reload helps after an update that failed halfway."""
    monkeypatch.setattr(engine_monitor, "_LONG_PAUSE", 0.0)
    scene.monitor.begin(scene.engine)
    scene.monitor.end(scene.engine, None, EngineError("engine: failed halfway"))
    status = scene.check(EngineHealth(is_paused=True))
    assert (status.trouble, status.paused_for > 0) == ("engine: failed halfway", True)
    assert scene.monitor.can_be_updated(scene.engine)
    assert not scene.monitor.must_verify(scene.engine)


def test_idle_engine_whose_workers_do_not_answer_is_gone(scene: Scene) -> None:
    assert scene.check(EngineHealth(is_stuck=True)).trouble == "engine: its workers do not answer"
    assert scene.monitor.is_gone(scene.engine)


def test_update_is_needed_unless_a_check_vouches_for_the_version(scene: Scene) -> None:
    assert scene.monitor.needs_update(scene.engine, 3)  # nothing checks it yet
    scene.monitor.start()
    assert not scene.monitor.needs_update(scene.engine, 3)
    assert scene.monitor.needs_update(scene.engine, 4)
    scene.monitor.close()
