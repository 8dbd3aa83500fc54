"""A run of ten hours with a version every hour and an anchor every third hour."""

from __future__ import annotations

import pytest

from support.clocked_bucket import HOUR, Clocked, clocked, copied, first_weights, publish
from support.sweep_runs import Lived


@pytest.fixture
def lived(ten_hours: Lived) -> Lived:
    return Lived(copied(ten_hours.bucket), {name: array.copy() for name, array in ten_hours.weights.items()})


@pytest.fixture(scope="session")
def ten_hours() -> Lived:
    """Tests must not change it."""
    bucket = clocked()
    return Lived(bucket, publish(bucket, first_weights(), 10, every=HOUR, clock=bucket, anchor_every=3))


@pytest.fixture
def bucket(lived: Lived) -> Clocked:
    return lived.bucket
