"""The interfaces: what a follower needs from an engine, and what a trainer needs from its server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from weightwire.delta import Delta
from weightwire.errors import EngineError

__all__ = [
    "CachePolicy",
    "CheckedEngine",
    "Engine",
    "EngineHealth",
    "RolloutServer",
    "ServedVersion",
    "Swap",
    "asleep",
    "not_verified",
]

CachePolicy = Literal["flush", "keep"]
"""What a patch does to the KV cache of running requests: they compute it again with the new weights, or keep it."""


@dataclass(frozen=True)
class ServedVersion:
    """A version of a run and the digest of its state."""

    run: str
    version: int
    state: str


@dataclass(frozen=True)
class Swap:
    """How long an update took. `staged`: seconds of preparation while serving. `paused`: seconds of pause."""

    staged: float
    paused: float
    at: float = field(default_factory=time.time)  # when the pause ended


class Engine(Protocol):
    """Serves one version at a time. Every call blocks until it is done, or raises an EngineError.

    After a failed call the engine serves the version before. If that is not certain, `holding` is None and only
    `reload` helps. A patch that was not swapped in is discarded.
    """

    name: str

    @property
    def holding(self) -> ServedVersion | None:
        """The version that it serves, or None if that is not known."""

    @property
    def can_patch(self) -> bool:
        """Whether it accepts patches. Otherwise every version is a reload."""

    def attach(self, run: str = "") -> ServedVersion | None:
        """Connects or reconnects. Returns the version served, if known, and reports it to clients if it is of `run`."""

    def adopt(self, checkpoint: Path, target: ServedVersion) -> bool:
        """Returns whether it already serves exactly this checkpoint, and if so remembers `target`."""

    def patch(self, patch: Delta, target: ServedVersion) -> Swap:
        """Patches an earlier version to `target`: stages while it serves, then swaps at once."""

    def reload(self, checkpoint: Path, target: ServedVersion) -> Swap:
        """Loads all weights of a checkpoint."""

    def close(self) -> None:
        """Disconnects. The engine keeps serving."""


@dataclass(frozen=True)
class EngineHealth:
    """What an engine that answers says about itself. `version` is the version that it reports to clients."""

    version: int | None = None
    is_asleep: bool = False  # or paused by another program: it generates nothing
    is_paused: bool = False  # by an update, perhaps of a follower that was killed, or one that failed
    is_stuck: bool = False  # its HTTP server answers, but what generates does not


@runtime_checkable
class CheckedEngine(Protocol):
    """An engine in another process, which may hang, sleep or be restarted without the follower."""

    name: str

    def check_health(self) -> EngineHealth:
        """Asks the engine, within 4 seconds and without disturbing an update. Raises EngineGone without an answer.

        Another thread than the other calls may call it, at the same time.
        """


class RolloutServer(Protocol):
    """A trainer's view of the server that generates for it. All calls raise EngineGone if it cannot be reached."""

    def served_version(self) -> int | None:
        """The version that it reports, or None if it was never given one."""

    def check(self) -> str:
        """The software and its version. Raises an EngineError if the server cannot be updated by a follower."""

    def forget_version(self) -> None:
        """Clears the version that it reports, until a follower sets it again."""


def asleep(name: str) -> EngineError:
    """The error for an engine that generates nothing, and not because of an update."""
    return EngineError(
        f"{name}: is asleep, or was paused by another program",
        hint="wake it with POST /wake_up, or resume it with POST /resume",
    )


def not_verified(name: str) -> EngineError:
    """The error of an engine that has slept, until its weights were compared."""
    return EngineError(
        f"{name}: was asleep, and its weights are not verified yet", hint="wait: they are compared or loaded again"
    )
