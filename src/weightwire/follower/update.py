"""An update: what a follower has reached, as it is handed to whoever keeps weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightwire.delta import Delta

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """What a follower has reached, and how to get there from the update before.

    `patch` has positions and absolute values, and is applied with `weightwire.patch`; None where all weights must be
    loaded anew, from `Follower.checkpoint()`.
    """

    version: int
    step: int | None
    state: str
    patch: Delta | None
    metrics: Mapping[str, float | None]
    time: float  # of the commit, by the publisher's clock
