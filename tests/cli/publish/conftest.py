"""A trainer that writes checkpoints, and the bucket that they are published to."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import Training


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "out")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"
