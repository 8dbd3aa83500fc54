"""An update, for engines that keep weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightwire.delta import Delta

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """A version that a follower has reached, and the patch from the update before.

    `patch` has positions and absolute values. Apply it with `weightwire.patch`. If it is None, load all weights from
    `Follower.checkpoint()`.
    """

    version: int
    step: int | None
    state: str
    patch: Delta | None
    metrics: Mapping[str, float | None]
    time: float  # of the commit, by the publisher's clock
