"""What all parts of a simulation share: the store, the trainers' true weights, and the promises that were broken."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faults.simulated_disk import SimDisk
from faults.simulated_keys import SimKeys
from faults.simulated_runtime import Ambush, Faults, Process, SimLoop, View
from faults.simulated_store import Store
from faults.store_rules import StoreRules
from weightwire import digest
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, Sealed, unseal
from weightwire.chain.writer import Signer
from weightwire.telemetry.events import Event
from weightwire.upkeep.retention import Retention
from weightwire.weights.source import read_weights

Arrays = dict[str, npt.NDArray[Any]]


class Violation(AssertionError):
    """A broken promise."""


@dataclass
class Truth:
    """The trainers' real weights by state, and the acknowledged versions."""

    states: dict[str, Arrays] = field(default_factory=dict)
    acknowledged: dict[int, str] = field(default_factory=dict)

    def remember(self, weights: Arrays) -> str:
        state = digest(weights, threads=1).hex
        self.states[state] = copy_of(weights)
        return state

    def differs(self, state: str, held: Any) -> str:
        """How weights differ from those of a state, or an empty string."""
        if state not in self.states:
            return "holds a state that no trainer ever had"
        true = self.states[state]
        found = {name: tensor.bits.tobytes() for name, tensor in read_weights(held).items()}
        if found != {name: array.tobytes() for name, array in true.items()}:
            return "holds other bits than its version has"
        return ""


@dataclass
class World:
    """One simulation. Its choices come from `random`, so a seed replays exactly."""

    random: random.Random
    loop: SimLoop
    room: Path
    trace: Callable[[str], None]
    faults: Faults
    crashes: bool
    power: bool  # a crash may take unsynced writes with it
    model: int  # rows of the largest tensor
    pushes: bool = False  # commits are pushed to followers, also by strangers
    calm: bool = False  # all faults are over
    truth: Truth = field(default_factory=Truth)
    store: Store = field(default_factory=Store)
    violations: list[str] = field(default_factory=list)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    keys: SimKeys | None = None  # None: the run is not signed
    views: dict[str, View] = field(default_factory=dict)  # by process name: what a lying store shows
    deceived: set[str] = field(default_factory=set)  # processes that a store has lied to
    disks: dict[str, SimDisk] = field(default_factory=dict)
    rotted: set[str] = field(default_factory=set)  # followers whose replica was damaged, which may lose it

    def __post_init__(self) -> None:
        self.store.watch = self.rules = StoreRules(self.violate)

    def violate(self, what: str) -> None:
        self.trace(f"{self.now()} VIOLATION: {what}")
        self.violations.append(what)
        self.broken.set()

    def check(self, state: str, held: Any, who: str) -> None:
        if problem := self.truth.differs(state, held):
            self.violate(f"{who}: {problem}")

    def now(self) -> str:
        return f"{self.loop.time():10.2f}"

    def listener(self, name: str) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            message = event.message.replace(str(self.room), "")  # its name is random
            self.trace(f"{self.now()} {name}: {event.stage} {event.version} {message}")

        return listen

    def process(self, name: str, ambush: Ambush | None = None) -> Process:
        calm = self.calm
        crash = None if calm or not self.crashes else self.random.choice([None, None, self.random.randint(0, 400)])
        # A follower that demands a recent sign of life needs a right clock.
        right = calm or (self.keys is not None and self.keys.has_ages and not name.startswith("trainer"))
        skew = 0.0 if right else self.random.choice([0.0, -3600.0, 86400.0])
        process = Process(name, random.Random(self.random.getrandbits(64)), self.faults, skew, crash)
        process.ambush = None if calm else ambush
        process.view = lambda: self.views.get(name)
        return process

    def is_genuine(self, commit: Sealed[Commit]) -> bool:
        return self.store.created.get(commit_path(commit.record.version)) == commit.data

    def commits(self) -> dict[int, Sealed[Commit]]:
        found = (unseal(data, Commit, path) for path, data in self.store.latest("commits/"))
        return {commit.record.version: commit for commit in found}

    def head(self) -> Sealed[Commit] | None:
        commits = self.commits()
        return commits[max(commits)] if commits else None

    def signer(self) -> Signer | None:
        return self.keys.signer(self.store.objects) if self.keys else None

    @property
    def retention(self) -> Retention:
        return self.rules.retention


def copy_of(weights: Any) -> Arrays:
    """A copy of arrays, or of the tensors of a replica or a checkpoint."""
    return {
        name: one.copy() if isinstance(one, np.ndarray) else one.bits.view(_KINDS[name]).reshape(one.shape).copy()
        for name, one in weights.items()
    }


_KINDS = {"layer.weight": np.float16, "norm": np.float32, "empty": np.float32}


def initial_weights(rng: random.Random, rows: int) -> Arrays:
    bits = np.frombuffer(rng.randbytes(rows * 32), np.uint16)
    return {
        "layer.weight": bits.copy().view(np.float16).reshape(rows, 16),
        "norm": np.array([rng.random() for _ in range(5)], np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }


def train(weights: Arrays, rng: random.Random) -> None:
    """Changes a few weights, sometimes none."""
    for name, most in (("layer.weight", 6), ("norm", 2)):
        flat = weights[name].reshape(-1).view(f"u{weights[name].itemsize}")
        for _ in range(rng.randint(0, most)):
            flat[rng.randrange(len(flat))] ^= rng.choice([1, 3, 1 << 10])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
