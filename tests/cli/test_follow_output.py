"""What `follow` and `serve` say of a version: what it took to get there, whatever else happens meanwhile."""

from __future__ import annotations

import pytest

from weightwire.cli.shared.follow_output import FollowListener, tell
from weightwire.follower import Update
from weightwire.telemetry import Event


def applied(version: int, nbytes: int) -> Event:
    return Event("apply", version, nbytes)


def update(version: int) -> Update:
    return Update(version, step=None, state="", patch=None, metrics={}, time=0.0)


def test_the_bytes_of_all_versions_up_to_it_count_and_those_of_later_ones_do_not() -> None:
    ear = FollowListener(None)
    for event in (applied(5, 1000), applied(6, 100), applied(7, 20), applied(8, 3)):
        ear(event)
    assert ear.take(6) == 1100
    assert ear.take(8) == 23


def test_a_version_that_was_held_before_took_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ear = FollowListener(None)
    assert tell(update(5), ear)[0] == 0
    assert capsys.readouterr().err == "version 5: held already\n"
    ear(applied(6, 7))
    assert ear.take(5) is None
    assert ear.take(6) == 7


def test_a_version_that_changes_nothing_was_not_held_before(capsys: pytest.CaptureFixture[str]) -> None:
    """A fence has no data."""
    ear = FollowListener(None)
    ear(applied(5, 0))
    tell(update(5), ear)
    assert capsys.readouterr().err == "version 5: 0 B\n"


def test_another_run_begins_with_lower_versions() -> None:
    ear = FollowListener(None)
    for event in (applied(41, 1000), applied(42, 100), applied(2, 7), applied(3, 1)):
        ear(event)
    assert ear.take(2) == 1107
    assert ear.take(3) == 1
