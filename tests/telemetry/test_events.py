"""Events as log lines: what went wrong is a warning, what went well can be had."""

from __future__ import annotations

import logging

import pytest

from weightwire.telemetry.events import Event, log_event, warning
from weightwire.telemetry.stages import STAGES


def test_a_stage_is_a_line_for_who_wants_to_know(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightwire"):
        log_event(Event("upload", 42, 1_234_567, 0.5))
    assert caplog.record_tuples == [("weightwire", logging.DEBUG, "upload version 42: 1234567 bytes, 0.500 s ")]


def test_a_stage_without_a_version(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightwire"):
        log_event(Event("capture", None, 10, 0.25))
    assert caplog.messages == ["capture: 10 bytes, 0.250 s "]


def test_a_warning_is_one(caplog: pytest.LogCaptureFixture) -> None:
    log_event(Event("warning", 3, message="100% of the bucket is gone: %s"))
    assert caplog.record_tuples == [("weightwire", logging.WARNING, "100% of the bucket is gone: %s")]


def test_nothing_is_said_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightwire"):
        for stage in STAGES:
            log_event(Event(stage.name, 1))
    assert not caplog.records


def test_a_warning_says_what_where_and_when() -> None:
    assert warning("the disk is full", 3, at=7.0) == Event("warning", 3, at=7.0, message="the disk is full")
