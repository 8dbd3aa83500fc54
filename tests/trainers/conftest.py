"""Fixtures of the tests of trainers."""

from __future__ import annotations

import pytest


@pytest.fixture
def trl_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.trl_on_cpu import patch_trl

    patch_trl(monkeypatch)
