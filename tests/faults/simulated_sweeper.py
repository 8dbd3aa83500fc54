"""Upkeep in a simulation: sweeps now and then, and just when a lease or a grace period ends."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress

from faults.lies import Lie
from faults.simulated_parts import swept
from faults.simulated_runtime import Ambush, Process
from faults.simulated_store import Objects, is_data
from faults.simulated_world import World
from weightwire.errors import BucketError, NoRun, RunError

_MOMENTS = [
    ("delete", "deltas/"),
    ("delete", "anchors/"),
    ("delete", "shortcuts/"),
    ("create", "gc/"),
    ("list", "deltas/"),
    ("list", "anchors/"),
    ("list", "shortcuts/"),
    ("list", "replicas/"),
]
_BROKEN = "replicas/unreadable.json"


def sweeper_ambush(rng: random.Random) -> Ambush:
    operation, prefix = rng.choice(_MOMENTS)
    return Ambush(operation, prefix, rng.random() < 0.5, rng.choice([0, 0, 1, 3]), rng.choice([None, 10, 60, 200]))


class SimSweeper:
    name = "upkeep"

    def __init__(self, world: World) -> None:
        self.world = world
        self.stop = asyncio.Event()
        self.pace = world.random.choice([3.0, 20.0])
        self.breaks = world.random.random() < 0.2  # a heartbeat that cannot be read, for a while
        self.misses = world.random.random() < 0.25  # a commit that the store does not show, for a while
        self.loses = world.random.random() < 0.4 and not world.faults.failed  # data, until the faults end
        self.lost: Objects = {}

    async def live(self, process: Process) -> bool:
        world = self.world
        while not self.stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), self._until_next(process.random))
            if self.breaks and process.random.random() < 0.3:
                self._break_heartbeat()
            if self.loses and process.random.random() < 0.2:
                self._lose_data(process.random)
            if self.misses and process.random.random() < 0.3:
                self._hide_commit(process.random)
            try:
                await swept(world.store, process, world.retention)
            except (BucketError, NoRun, RunError) as problem:
                world.trace(f"{world.now()} {self.name}: {problem.message}")
            world.views.pop(self.name, None)
            world.rules.may_delete = True
        self._find_lost()  # not during a sweep, whose limits would be others
        return True

    def _find_lost(self) -> None:
        """Brings back what was lost, as from a backup."""
        for path, found in self.lost.items():
            self.world.store.objects.setdefault(path, found)

    def _lose_data(self, rng: random.Random) -> None:
        objects = self.world.store.objects
        store = self.world.store
        records = b"".join(data for _, data in store.latest("commits/") + store.latest("shortcuts/"))
        paths = [path for path in objects if is_data(path) and path.encode() in records]
        if paths:
            newest = max(paths, key=lambda path: int(path.split("/")[1]))
            path = rng.choice([rng.choice(paths), newest])
            self.lost[path] = objects.pop(path)

    def _hide_commit(self, rng: random.Random) -> None:
        """A hole in the chain: nothing may be deleted."""
        commits = sorted(self.world.store.paths("commits/"))
        if len(commits) > 1:
            lie = Lie(self.world.store, {rng.choice(commits[:-1]): None})
            self.world.views[self.name] = lie
            self.world.rules.may_delete = False

    def _until_next(self, rng: random.Random) -> float:
        """Seconds until the next sweep: any time, or around the end of a lease or of a grace period."""
        store, ends = self.world.store, []
        for path in store.paths("replicas/"):
            with suppress(ValueError):
                ends.append(store.objects[path][1] + json.loads(store.objects[path][0])["lease"])
        ends += [store.objects[path][1] + self.world.retention.grace for path in store.paths("gc/")]
        later = [end - store.now() + rng.uniform(-1, 1) for end in ends if end > store.now() + 1]
        return rng.choice(later) if later and rng.random() < 0.3 else rng.expovariate(1 / self.pace)

    def _break_heartbeat(self) -> None:
        objects = self.world.store.objects
        if _BROKEN in objects:
            del objects[_BROKEN]
        else:
            objects[_BROKEN] = b"{", self.world.store.now()
