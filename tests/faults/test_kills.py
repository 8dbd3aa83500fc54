"""Real processes, killed at any moment: see `faults/kills.py`, of which these are a few rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.kills import play


@pytest.mark.slow
def test_whoever_is_killed_comes_back(tmp_path: Path) -> None:
    play(rounds=10, seed=2, room=tmp_path)
