"""Shared fixtures."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.patch_checks import shard
from support.samples import words
from weightwire import (
    Delta,
    diff,
)


@pytest.fixture
def ranks() -> tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]:
    """A tensor before and after, and the deltas of two ranks with half of it each."""
    old = words(1, 1600).view(np.uint16).reshape(100, 64)
    new = old.copy()
    new[[3, 49, 50, 99], [1, 2, 3, 4]] ^= 1
    return old, new, [diff(shard(old, *rows), shard(new, *rows)) for rows in ((0, 50), (50, 100))]
