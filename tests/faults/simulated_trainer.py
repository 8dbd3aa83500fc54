"""A trainer in a simulation: publishes some versions, is replaced by rivals, and crashes or pauses at bad moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from faults.simulated_parts import SIDE_FILES, publisher
from faults.simulated_runtime import Ambush, Process
from faults.simulated_world import Arrays, World, copy_of, initial_weights, train
from weightwire.chain.record_paths import RUN, commit_path
from weightwire.chain.records import Commit, unseal
from weightwire.chain.writer import Signer
from weightwire.errors import BrokenChain, BucketError, Fenced, ForeignRun, Untrusted, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.weights.source import read_weights

# Requests around which a publisher may crash, or sleep until a rival has taken over.
_MOMENTS = [
    ("create", "commits/"),
    ("create", "commits/"),
    ("create", "epochs/"),
    ("create", "run.json"),
    ("create", "shortcuts/"),
    ("create", "shortcuts/"),
    ("put", "anchors/"),
    ("put", "deltas/"),
    ("put", "deltas/"),
    ("put", "deltas/"),
    ("thread", "advance"),
    ("list", "epochs/"),
]


_PATIENCE = 50  # failed starts until faults become rarer: a trainer that reads a long chain may never start otherwise


def publisher_ambush(rng: random.Random) -> Ambush:
    operation, prefix = rng.choice(_MOMENTS)
    pause = rng.choice([None, None, 5.0, 30.0, 90.0, 300.0])
    return Ambush(operation, prefix, rng.random() < 0.5, rng.choice([0, 0, 1, 2, 5]), pause)


def rival_ambush(rng: random.Random) -> Ambush:
    """A pause just before it claims the run, an epoch or a version: a rival is likely to be first."""
    return Ambush("create", rng.choice(["epochs/", "epochs/", "run.json", "commits/"]), False, 0, rng.uniform(0.1, 5.0))


class Watched(Publication):
    """Signals its end with an event, because polling would be slow in virtual time."""

    def __init__(self, step: int, on_success: Callable[[Publication], None]) -> None:
        super().__init__(step=step)
        self.ended = asyncio.Event()
        self.on_success = on_success

    def succeed(self, commit: Commit) -> None:
        super().succeed(commit)
        self.on_success(self)
        self.ended.set()

    def fail(self, error: WeightwireError) -> None:
        super().fail(error)
        self.ended.set()

    def supersede(self, newer: Publication) -> None:
        super().supersede(newer)
        self.ended.set()


class SimTrainer:
    def __init__(self, world: World, name: str, versions: int) -> None:
        self.world = world
        self.name = name
        self.versions = versions
        self.pace = world.random.choice([0.05, 0.5, 5.0, 30.0])  # seconds between versions
        self.anchor_every = world.random.choice([None, 2, 2, 5])
        self.signer: Signer | None = None
        self.is_stray = world.keys is not None and world.random.random() < 0.1  # has no key, and must be refused
        self.failed_starts = 0
        self.stays: asyncio.Event | None = None  # it is done, and shows signs of life until then

    async def live(self, process: Process) -> bool:
        """Publishes some versions. Returns whether it is finished: done, or replaced by another publisher."""
        rng = process.random
        strays = self.is_stray and RUN in self.world.store.objects  # otherwise it would begin an unsigned run
        self.signer = self.signer or (None if strays else self.world.signer())
        settings = PublisherSettings(
            threads=1, anchor_every=self.anchor_every, retry_seconds=30.0, files=SIDE_FILES, signer=self.signer
        )
        if self._is_refused():
            self.world.rules.refused.add(process)
        work = publisher(self.world.store, process, settings, self.world.listener(self.name))
        try:
            await work.process.start()
        except Fenced as problem:
            self.check_fenced(work, problem)
            return True
        except BucketError as problem:
            self.world.trace(f"{self.world.now()} {self.name}: could not start ({problem.message})")
            self.failed_starts += 1
            if self.failed_starts % _PATIENCE == 0:
                self.world.faults.ease()
            return False
        except (Untrusted, BrokenChain, ForeignRun) as problem:
            self.world.trace(f"{self.world.now()} {self.name}: refuses to start ({problem.message})")
            return self.check_refused(problem)
        running = process.start(work.run())
        if work.process.copies and work.process.state:
            weights = copy_of(work.process.copies.published)
        else:
            weights = initial_weights(rng, self.world.model)
        publication = None
        for step in range(self.versions):
            train(weights, rng)
            await self._wait_for_copies(work)
            publication = self._publish(work, weights, step)
            await asyncio.sleep(rng.expovariate(1 / self.pace))
            if work.context.lifecycle.failure is not None:
                self.check_fenced(work, work.context.lifecycle.failure)
                return True
        if publication is not None:
            await publication.ended.wait()
        if self.stays is not None:
            await self.stays.wait()
        await work.close()
        await running
        await work.close()
        if work.context.lifecycle.failure is not None:
            self.check_fenced(work, work.context.lifecycle.failure)
        return True

    async def _wait_for_copies(self, work: PublishLoop) -> None:
        pause = 0.01
        while (copies := work.process.copies) is not None and copies.busy:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 60.0)

    def _publish(self, work: PublishLoop, weights: Arrays, step: int) -> Watched:
        state = self.world.truth.remember(weights)
        publication = Watched(step, lambda done: self._acknowledge(done, state))
        work.capture(publication, read_weights(weights))
        work.wake()
        return publication

    def _acknowledge(self, publication: Publication, state: str) -> None:
        """A version that was acknowledged exists, with these weights and no others."""
        assert publication.version is not None
        version, truth = publication.version, self.world.truth
        if truth.acknowledged.setdefault(version, state) != state:
            self.world.violate(f"version {version} was acknowledged twice, with different weights")
        stored = self.world.store.objects.get(commit_path(version))
        if stored is None or unseal(stored[0], Commit, "").record.after != state:
            self.world.violate(f"version {version} was acknowledged, and is not there")

    def check_fenced(self, work: PublishLoop, failure: WeightwireError) -> None:
        if self.name in self.world.deceived:
            return
        if not isinstance(failure, Fenced):
            self.world.violate(f"a publisher failed: {failure!r} {failure.__cause__!r}")
            return
        epochs = [commit.record.epoch for commit in self.world.commits().values()]
        claimed = [int(path[7:15]) for path in self.world.store.paths("epochs/")]
        mine = work.process.writer.epoch if work.process.writer else min(claimed)
        if not any(epoch > mine for epoch in epochs):
            self.world.violate(f"epoch {mine} was fenced off, but nobody has taken over")

    def check_refused(self, problem: WeightwireError) -> bool:
        """A publisher may refuse a run only if its key is not in force, or a store lies to it. Returns if for good."""
        world = self.world
        if self._is_refused():
            return True
        if self.name not in world.deceived:
            world.violate(f"{self.name}: refuses an honest run: {problem!r}")
        return False

    def _is_refused(self) -> bool:
        """Whether the run is signed, and the key of this trainer is not in force."""
        keys, key = self.world.keys, self.signer.key if self.signer else None
        return keys is not None and key not in keys.in_force(self.world.store.objects)
