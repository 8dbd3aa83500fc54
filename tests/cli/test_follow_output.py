"""The line that `follow` and `serve` print for a version: bytes fetched for it, even if later ones arrive meanwhile."""

from __future__ import annotations

import pytest

from weightwire.cli.shared.follow_output import FollowListener, report
from weightwire.follower import Update
from weightwire.telemetry import Event


def applied(version: int, nbytes: int) -> Event:
    return Event("apply", version, nbytes)


def update(version: int) -> Update:
    return Update(version, step=None, state="", patch=None, metrics={}, time=0.0)


def test_bytes_include_all_versions_up_to_the_reported_one() -> None:
    listener = FollowListener(None)
    for event in (applied(5, 1000), applied(6, 100), applied(7, 20), applied(8, 3)):
        listener(event)
    assert listener.bytes_fetched(6) == 1100
    assert listener.bytes_fetched(8) == 23


def test_version_that_was_already_held_has_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    listener = FollowListener(None)
    report(update(5), listener.arrival(update(5)))
    assert capsys.readouterr().err == "version 5: held already\n"
    listener(applied(6, 7))
    assert listener.bytes_fetched(5) is None
    assert listener.bytes_fetched(6) == 7


def test_version_without_data_is_not_reported_as_held(capsys: pytest.CaptureFixture[str]) -> None:
    """A fence has no data."""
    listener = FollowListener(None)
    listener(applied(5, 0))
    report(update(5), listener.arrival(update(5)))
    assert capsys.readouterr().err == "version 5: 0 B\n"


def test_bytes_are_counted_after_a_change_to_another_run() -> None:
    listener = FollowListener(None)
    for event in (applied(41, 1000), applied(42, 100), applied(2, 7), applied(3, 1)):
        listener(event)
    assert listener.bytes_fetched(2) == 1107
    assert listener.bytes_fetched(3) == 1
