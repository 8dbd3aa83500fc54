"""That the trainer and every replica hold the same bits: digests of what each of them has, taken where it lies.

The trainer's are those of the checkpoint that it wrote of its own weights in the end, a replica's those of its
directory and of the weights in its engine's memory, as far as the engine can tell.
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
    """The state that all of them hold, and who they are."""

    state: str
    holders: tuple[str, ...]


def prove(replicas: Sequence[ReplicaProgram], trained: Path) -> Proof:
    """Raises EngineError where one holds other bits than the trainer."""
    state = digest(trained).hex
    for replica in replicas:
        _check(replica.name, "replica", digest(replica.into / "current").hex, state)
        if replica.follower is None:  # the server is ours, and tells what is in its memory
            _check(replica.name, "engine", _in_memory(replica.url), state)
    return Proof(state, ("trainer", *(one.name for one in replicas)))


def _check(name: str, what: str, held: str, state: str) -> None:
    if held != state:
        raise EngineError(
            f"{name}: its {what} holds state {held[:12]}, and the trainer {state[:12]}",
            hint="this must never happen: please report it, with the logs",
        )


def _in_memory(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/weights", timeout=30) as answer:
            return str(json.load(answer)["state"])
    except (OSError, urllib.error.URLError, ValueError) as problem:
        raise EngineGone(f"{url}: does not tell what it holds ({problem})", hint="see its log") from problem
