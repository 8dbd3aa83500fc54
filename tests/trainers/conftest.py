"""Fixtures of the tests of trainers."""

from __future__ import annotations

import pytest

from weightwire.bucket import silence


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls for seconds is not a silent store, which would be one more warning."""
    monkeypatch.setattr(silence, "_SECONDS", 60.0)


@pytest.fixture
def trl_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.trl_on_cpu import patch_trl

    patch_trl(monkeypatch)
