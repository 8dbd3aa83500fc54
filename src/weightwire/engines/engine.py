"""The ports: what an engine offers to a follower, and its server to a trainer. Knows neither torch nor HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from weightwire.delta import Delta

__all__ = ["Engine", "RolloutServer", "ServedVersion", "Swap"]


@dataclass(frozen=True)
class ServedVersion:
    """A version of a run, and the digest of its state."""

    run: str
    version: int
    state: str


@dataclass(frozen=True)
class Swap:
    """How long an update took: getting ready while the engine served, and the pause in which it did not."""

    staged: float
    paused: float
    at: float = field(default_factory=time.time)  # when it served again


class Engine(Protocol):
    """Serves one version at a time. Every call returns when it is done, or raises an EngineError.

    Where a call fails the engine serves what it served before; if even that is not known, `holding` is None and only
    `reload` helps. Nothing is kept of a patch that was not swapped in.
    """

    name: str

    @property
    def holding(self) -> ServedVersion | None:
        """What it serves, as far as is known here."""

    @property
    def can_patch(self) -> bool:
        """That it takes patches; else every version is a reload."""

    def attach(self, run: str = "") -> ServedVersion | None:
        """Makes contact, again after it was lost. Returns what it serves, if it knows; of this run it then says so."""

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        """Whether it serves this checkpoint already, bit for bit; if so, it knows from now on."""

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        """Takes it from an earlier version to this one, while it serves, and swaps all at once."""

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        """Loads all weights anew."""

    def close(self) -> None:
        """Lets go of it; it goes on serving."""


class RolloutServer(Protocol):
    """What a trainer asks the server that generates for it. All calls raise EngineGone while it cannot be reached."""

    def served_version(self) -> int | None:
        """The version that it says it serves; None if it was never given one."""

    def check(self) -> None:
        """Raises an EngineError where it was not started so that a follower can update it."""

    def forget_version(self) -> None:
        """From now on it does not say what it serves, until a follower tells it."""
