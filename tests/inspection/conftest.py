"""A run to inspect and damage."""

from __future__ import annotations

import pytest

from support.clocked_bucket import HOUR, Clocked, clocked, copied, first_weights, publish, stepped
from support.verify_runs import FILES


@pytest.fixture
def bucket(nine_versions: Clocked) -> Clocked:
    """Versions 0 to 8: 0 and 6 are fences; 1, 4, 7 and 8 have anchors."""
    return copied(nine_versions)


@pytest.fixture(scope="session")
def nine_versions() -> Clocked:
    """Tests must not change it."""
    bucket = clocked()
    weights = publish(bucket, first_weights(), 5, every=HOUR, clock=bucket, anchor_every=3, files=FILES)
    publish(bucket, stepped(weights, 9), 2, every=HOUR, clock=bucket, anchor_every=1)
    return bucket
