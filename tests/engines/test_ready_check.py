"""When a replica and its engines are ready, and what is said if they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightwire.engines import ready_check
from weightwire.engines.engine_monitor import EngineStatus
from weightwire.engines.ready_check import ReadyCheck, ReadyLimits
from weightwire.telemetry.events import Event


def follower(version: int | None = 5, head: int = 5, trouble: str = "", outage: float = 0.0) -> Any:
    return SimpleNamespace(version=version, head=head, trouble=trouble, outage=outage)


def keeper(*statuses: EngineStatus) -> Any:
    trouble = "; ".join(one.trouble for one in statuses if one.trouble)
    return SimpleNamespace(statuses=lambda: statuses, trouble=trouble)


def reasons(following: Any, kept: Any = None, *, max_behind: int | None = None, max_lag: float | None = None) -> str:
    return "; ".join(ReadyCheck(ReadyLimits(max_behind, max_lag)).state(following, kept).reasons)


def test_replica_without_engines_is_ready_once_it_holds_a_version() -> None:
    assert reasons(follower(None, -1)) == "this replica: no version of this run yet"
    assert reasons(follower()) == ""


def test_engines_are_ready_if_all_of_them_serve_a_version() -> None:
    both = keeper(EngineStatus("a", 5), EngineStatus("b"))
    assert reasons(follower(), both) == "b: no version of this run yet"
    assert reasons(follower(), keeper(EngineStatus("a", 5), EngineStatus("b", 4))) == ""


def test_engines_are_not_ready_before_the_follower_knows_the_run() -> None:
    assert reasons(follower(None, -1), keeper(EngineStatus("a", 5))) == "this replica holds no version yet"


def test_engine_in_trouble_is_not_ready() -> None:
    troubled = keeper(EngineStatus("a", 5, trouble="a: does not answer"))
    state = ReadyCheck(ReadyLimits()).state(follower(trouble="no bucket"), troubled)
    assert (state.is_ready, state.reasons) == (False, ("a: does not answer",))
    assert state.trouble == "no bucket; a: does not answer"


def test_paused_engine_is_not_ready() -> None:
    assert reasons(follower(), keeper(EngineStatus("a", 5, paused_for=4.2))) == "a: paused for 4 s by an update"


@pytest.mark.parametrize(("served", "text"), [(3, ""), (2, "a: 3 versions behind; 2 are allowed")])
def test_engine_may_be_some_versions_behind(served: int, text: str) -> None:
    assert reasons(follower(), keeper(EngineStatus("a", served)), max_behind=2) == text


def test_behind_is_that_of_the_last_engine() -> None:
    check = ReadyCheck(ReadyLimits())
    state = check.state(follower(), keeper(EngineStatus("a", 5), EngineStatus("b", 3, pause_seconds=0.05)))
    assert (state.version, state.head, state.behind) == (5, 5, 2)
    assert [(one.behind, one.pause_seconds) for one in state.engines] == [(0, None), (2, 0.05)]
    assert check.state(follower(), keeper(EngineStatus("a", 5), EngineStatus("b"))).behind is None


def test_lag_counts_from_the_discovery_of_the_first_version_that_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(ready_check, "time", SimpleNamespace(monotonic=lambda: now))
    check, status = ReadyCheck(ReadyLimits(max_lag=0.1)), EngineStatus("a", 4)
    check(Event("discover", 4))
    assert check.state(follower(4, 4), keeper(status)).is_ready
    check(Event("discover", 5))
    assert check.state(follower(), keeper(status)).is_ready
    now += 0.25
    check(Event("discover", 6))
    now += 0.5
    state = check.state(follower(6, 6), keeper(status))
    assert state.behind_seconds == 0.75
    assert state.reasons[0] == "a: behind for 0.8 s; 0.1 s are allowed"
    assert check.state(follower(6, 6), keeper(EngineStatus("a", 5))).behind_seconds == 0.5
    assert check.state(follower(6, 6), keeper(EngineStatus("a", 6))).behind_seconds == 0


def test_lag_counts_the_time_in_which_the_bucket_could_not_be_read() -> None:
    following = follower(trouble="no bucket", outage=12.0)
    assert reasons(following, max_lag=20.0) == ""
    assert reasons(following, max_lag=10.0) == "this replica: behind for 12.0 s; 10 s are allowed"


def test_discovered_versions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_check, "_MOST", 3)
    check = ReadyCheck(ReadyLimits())
    for version in range(10):
        check(Event("discover", version))
    assert [version for version, _ in check._discovered] == [7, 8, 9]
    check.state(follower(8, 9), None)
    assert [version for version, _ in check._discovered] == [9]
