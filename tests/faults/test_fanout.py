"""A small run of `faults/fanout.py`: followers that start and stop at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.fanout import MOST_LATE, late_share, play
from support.stores import SeaweedFS


@pytest.mark.slow
def test_many_followers_keep_up(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    lags = play(seaweedfs, tmp_path, seed=1, followers=4, versions=15)

    assert lags
    assert late_share(lags) <= MOST_LATE
