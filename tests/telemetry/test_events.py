"""Events as log lines: warnings are logged as warnings, stages at debug level."""

from __future__ import annotations

import logging

import pytest

from weightwire.telemetry.events import Event, log_event, warning
from weightwire.telemetry.stages import STAGES


def test_stage_is_logged_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightwire"):
        log_event(Event("upload", 42, 1_234_567, 0.5))
    assert caplog.record_tuples == [("weightwire", logging.DEBUG, "upload version 42: 1234567 bytes, 0.500 s ")]


def test_stage_without_a_version(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightwire"):
        log_event(Event("capture", None, 10, 0.25))
    assert caplog.messages == ["capture: 10 bytes, 0.250 s "]


def test_warning_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    log_event(Event("warning", 3, message="100% of the bucket is gone: %s"))
    assert caplog.record_tuples == [("weightwire", logging.WARNING, "100% of the bucket is gone: %s")]


def test_warning_without_logging_set_up_names_weightwire(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("weightwire"), "propagate", False)
    log_event(warning("the bucket is gone", at=0))
    assert capsys.readouterr().err == "weightwire: the bucket is gone\n"


def test_stages_are_not_logged_at_info_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "weightwire"):
        for stage in STAGES:
            log_event(Event(stage.name, 1))
    assert not caplog.records


def test_warning_has_message_version_and_time() -> None:
    assert warning("the disk is full", 3, at=7.0) == Event("warning", 3, at=7.0, message="the disk is full")
