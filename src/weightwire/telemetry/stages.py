"""The stages that a version passes on its way from the trainer to an engine, in order.

Events, metrics, the page and the benchmarks use this list. To add a stage, add a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["STAGES", "Side", "Stage", "stage_names"]

Side = Literal["publisher", "follower", "engine"]


@dataclass(frozen=True)
class Stage:
    """A stage: where it happens, and its label in a legend."""

    name: str
    side: Side
    label: str


STAGES = (
    Stage("capture", "publisher", "capture"),
    Stage("encode", "publisher", "encode"),
    Stage("upload", "publisher", "upload"),
    Stage("commit", "publisher", "commit"),
    Stage("discover", "follower", "discover"),
    Stage("fetch", "follower", "fetch"),
    Stage("verify", "follower", "verify"),
    Stage("apply", "follower", "apply"),
    Stage("stage", "engine", "stage: prepared for the engine"),
    Stage("swap", "engine", "swap: the pause"),
)


def stage_names(*sides: Side) -> tuple[str, ...]:
    """The names of the stages on these sides, in order."""
    return tuple(stage.name for stage in STAGES if stage.side in sides)
