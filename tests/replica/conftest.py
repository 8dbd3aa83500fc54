"""A replica at version 0, without fsync."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.replicas import STORY
from weightwire.replica.replica import Replica


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tests fast. test_replica_crash.py covers power cuts."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    """A replica at version 0."""
    with Replica.open(tmp_path / "replica", threads=1) as opened:
        STORY.build(opened)
        yield opened
