"""A server is ready while it serves a version that is new enough."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from support.completion_server import CompletionClient
from weightwire.follower.update import Update
from weightwire.server.serving_check import ServingCheck, ServingLimits


class Scene:
    """A follower and a keeper, of which only the versions matter."""

    def __init__(self, **limits: Any) -> None:
        self.follower = SimpleNamespace(head=-1, trouble="")
        self.keeper = SimpleNamespace(served=None, trouble="")
        follower: Any = self.follower
        keeper: Any = self.keeper
        self.check = ServingCheck(follower, keeper, ServingLimits(**limits))

    def arrive(self, version: int, age: float = 0.0, *, served: bool = True) -> None:
        self.follower.head = max(self.follower.head, version)
        self.check.note(Update(version, None, "", None, {}, time.time() - age))
        self.keeper.served = version if served else self.keeper.served

    @property
    def reason(self) -> Any:
        state = self.check.look()
        assert state["ready"] is (state["reason"] is None)
        return state["reason"]


def test_a_server_without_a_version_is_not_ready() -> None:
    scene = Scene()
    assert scene.reason == "no version of the run is served yet"
    scene.arrive(1)
    assert scene.reason is None


def test_a_server_may_be_some_versions_behind() -> None:
    scene = Scene(max_behind=2)
    scene.arrive(1)
    for head, reason in ((3, None), (4, "3 versions behind the newest; at most 2 are allowed")):
        scene.follower.head = head
        assert scene.reason == reason
    scene.arrive(5)
    assert scene.reason is None


def test_a_version_may_be_some_seconds_old() -> None:
    scene = Scene(max_age=60)
    scene.arrive(1, age=30)
    assert scene.reason is None
    scene.arrive(2, age=100)
    assert scene.reason == "the served version was committed 100 s ago; at most 60 s are allowed"


def test_the_age_is_that_of_the_served_version() -> None:
    scene = Scene(max_age=60)
    scene.arrive(1, age=100)
    scene.arrive(2, served=False)
    scene.arrive(3, served=False)
    assert scene.check.look()["age_seconds"] == pytest.approx(100, abs=1)
    scene.keeper.served = 3
    assert scene.reason is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in its only entry. It does not pass by itself."""
    now = [1000.0]
    monkeypatch.setattr("weightwire.server.serving_check.monotonic", lambda: now[0])
    return now


def test_the_lag_begins_with_a_version_that_is_not_served(clock: list[float]) -> None:
    scene = Scene(max_lag=5)
    scene.arrive(1)
    clock[0] += 100
    scene.check.refresh()
    assert scene.reason is None
    scene.follower.head = 2
    clock[0] += 5
    assert scene.reason is None
    clock[0] += 1
    assert scene.reason == "behind the newest version for 6 s; at most 5 s are allowed"
    scene.follower.head = 3
    scene.arrive(2)
    assert scene.check.look()["behind_seconds"] == 6
    scene.arrive(3)
    assert scene.reason is None


def test_the_lag_counts_while_the_bucket_cannot_be_read(clock: list[float]) -> None:
    scene = Scene(max_lag=5)
    scene.arrive(1)
    scene.check.refresh()
    scene.follower.trouble = "the bucket does not answer"
    clock[0] += 6
    scene.check.refresh()
    assert scene.check.look()["behind_seconds"] == 6
    assert "behind the newest version for 6 s" in scene.reason
    scene.follower.trouble = ""
    assert scene.reason is None


def test_an_engine_that_refuses_a_version_is_not_ready() -> None:
    scene = Scene()
    scene.arrive(1)
    scene.keeper.trouble = "tensor 'secret': another shape"
    assert scene.reason == "the model could not take a version: see the output of the server"


def test_a_version_that_was_not_announced_counts_from_its_first_look() -> None:
    scene = Scene(max_age=60)
    scene.keeper.served = scene.follower.head = 7
    state = scene.check.look()
    assert (state["ready"], state["version"], state["behind"]) == (True, 7, 0)
    assert state["age_seconds"] < 1


def test_a_server_without_a_run_is_alive_and_not_ready(client: CompletionClient) -> None:
    assert client.call("/healthz") == (200, {"status": "alive"})
    status, state = client.call("/readyz")
    assert (status, state["ready"], state["version"], state["behind"]) == (503, False, None, None)


def test_a_paused_server_is_not_ready(client: CompletionClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServingCheck, "look", lambda _: {"ready": True, "reason": None})
    assert client.call("/readyz")[0] == 200
    client.call("/pause?mode=keep", b"")
    try:
        assert client.call("/readyz") == (503, {"ready": False, "reason": "paused: POST /resume continues"})
    finally:
        client.call("/resume", b"")
