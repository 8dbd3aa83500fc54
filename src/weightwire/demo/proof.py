"""Proves that the trainer and every replica hold the same bits, by comparing digests.

The trainer's digest is that of the checkpoint it saves at the end. A replica's digests are those of its directory and,
if its engine reports one, of the weights in the engine's memory.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightwire.delta import digest
from weightwire.demo.programs import ReplicaProgram
from weightwire.errors import EngineError, EngineGone

__all__ = ["Proof", "prove"]


@dataclass(frozen=True)
class Proof:
    """The state digest that all holders share."""

    state: str
    holders: tuple[str, ...]


def prove(replicas: Sequence[ReplicaProgram], trained: Path) -> Proof:
    """Raises EngineError if a replica holds other bits than the trainer."""
    state = digest(trained).hex
    for replica in replicas:
        _check(replica.name, "replica", digest(replica.into / "current").hex, state)
        if replica.follower is None:  # our own server reports the digest of its memory
            _check(replica.name, "engine", _in_memory(replica.url), state)
    return Proof(state, ("trainer", *(one.name for one in replicas)))


def _check(name: str, what: str, held: str, state: str) -> None:
    if held != state:
        raise EngineError(
            f"{name}: the {what} holds state {held[:12]}, but the trainer holds {state[:12]}",
            hint="this is a bug in weightwire: please report it with the logs",
        )


def _in_memory(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/weights", timeout=30) as answer:
            return str(json.load(answer)["state"])
    except (OSError, urllib.error.URLError, ValueError) as problem:
        raise EngineGone(
            f"{url}: cannot read the digest of its weights ({problem})", hint="see the replica's log"
        ) from problem
