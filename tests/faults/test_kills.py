"""A few rounds of `faults/kills.py`: real processes, killed at random moments. `test_soak.py` kills many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.kills import play


@pytest.mark.slow
def test_killed_processes_recover(tmp_path: Path) -> None:
    play(rounds=4, seed=2, room=tmp_path)
