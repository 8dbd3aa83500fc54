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
    listener = FollowListener(None)
    for event in (applied(5, 1000), applied(6, 100), applied(7, 20), applied(8, 3)):
        listener(event)
    assert listener.fetched_bytes(6) == 1100
    assert listener.fetched_bytes(8) == 23


def test_a_version_that_was_held_before_took_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    listener = FollowListener(None)
    assert tell(update(5), listener)[0] == 0
    assert capsys.readouterr().err == "version 5: held already\n"
    listener(applied(6, 7))
    assert listener.fetched_bytes(5) is None
    assert listener.fetched_bytes(6) == 7


def test_a_version_that_changes_nothing_was_not_held_before(capsys: pytest.CaptureFixture[str]) -> None:
    """A fence has no data."""
    listener = FollowListener(None)
    listener(applied(5, 0))
    tell(update(5), listener)
    assert capsys.readouterr().err == "version 5: 0 B\n"


def test_another_run_begins_with_lower_versions() -> None:
    listener = FollowListener(None)
    for event in (applied(41, 1000), applied(42, 100), applied(2, 7), applied(3, 1)):
        listener(event)
    assert listener.fetched_bytes(2) == 1107
    assert listener.fetched_bytes(3) == 1
