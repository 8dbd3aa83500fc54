"""Progress callbacks count bytes, and cannot stop the work that they report."""

from __future__ import annotations

import logging

import pytest

from weightwire.telemetry import start_progress


def test_a_callback_receives_stage_bytes_and_total() -> None:
    calls: list[tuple[str, int, int]] = []
    count = start_progress(lambda *call: calls.append(call))("encode", 10)
    count(4)
    count(6)
    assert calls == [("encode", 0, 10), ("encode", 4, 10), ("encode", 6, 10)]


def test_a_callback_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(stage: str, nbytes: int, total: int) -> None:
        raise RuntimeError("no terminal")

    count = start_progress(broken)("upload", 10)
    count(10)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]
