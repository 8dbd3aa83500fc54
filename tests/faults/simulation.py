"""Publishers, followers and upkeep in a world of faults: the real code, a seed for everything that can go wrong.

    python tests/faults/simulation.py --seeds 10000          # all of them, in order
    python tests/faults/simulation.py --seed 4711 --trace    # one again, exactly as it was

What must hold, whatever happens: no follower ever holds wrong bits, no acknowledged version is lost, there is one
history, nobody is fenced off without a successor, and once the faults end everybody catches up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where it is run as a script

from faults.simulated_runtime import Faults, Process, SimBucket, SimLoop, SimRuntime, Store
from weightwire import digest, patch
from weightwire.chain.records import Commit, unseal
from weightwire.errors import BucketError, Fenced, NoRun, WeightwireError
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.follow_loop import FollowLoop
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.single_process import SingleProcess
from weightwire.replica.replica import Replica
from weightwire.telemetry.events import Event
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import Retention
from weightwire.weights.source import read_weights

Arrays = dict[str, npt.NDArray[Any]]


class Violation(AssertionError):
    """A promise that was broken."""


@dataclass
class Truth:
    """What the trainers really had, and what they were told."""

    states: dict[str, dict[str, bytes]] = field(default_factory=dict)
    acknowledged: dict[int, str] = field(default_factory=dict)

    def remember(self, weights: Arrays) -> str:
        state = digest(weights, threads=1).hex
        self.states[state] = _bytes(weights)
        return state

    def check(self, state: str, held: Any, who: str) -> None:
        if state not in self.states:
            raise Violation(f"{who}: holds a state that no trainer ever had")
        if _bytes(held) != self.states[state]:
            raise Violation(f"{who}: holds other bits than its version has")


def _bytes(weights: Any) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in read_weights(weights).items()}


class Watched(Publication):
    """Tells at once what became of it: asking again and again would take for ever in a world where hours pass."""

    def __init__(self, step: int, ended: asyncio.Event, told: Callable[[Publication], None]) -> None:
        super().__init__(step=step)
        self.ended = ended
        self.told = told

    def succeed(self, commit: Commit) -> None:
        super().succeed(commit)
        self.told(self)
        self.ended.set()

    def fail(self, error: WeightwireError) -> None:
        super().fail(error)
        self.ended.set()

    def supersede(self, newer: Publication) -> None:
        super().supersede(newer)
        self.ended.set()


class Simulation:
    def __init__(self, seed: int, loop: SimLoop, room: Path, trace: Callable[[str], None]) -> None:
        self.random = random.Random(seed)
        self.loop = loop
        self.room = room
        self.trace = trace
        self.store = Store()
        self.truth = Truth()
        self.calm = False
        self.violations: list[str] = []
        chance = self.random.random
        self.faults = Faults(
            failed=0.1 * chance() if chance() < 0.7 else 0.0,
            lost=0.1 * chance() if chance() < 0.7 else 0.0,
            landing=0.5,
            slow=0.05 * chance(),
            pause=0.002 * chance() if chance() < 0.4 else 0.0,
        )
        self.crashes = chance() < 0.7
        self.rivals = 1 + (chance() < 0.5) + (chance() < 0.2)
        self.followers = self.random.randint(1, 3)
        self.versions = self.random.randint(3, 12)

    # --- processes -----------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        calm = self.calm
        crash = None if calm or not self.crashes else self.random.choice([None, self.random.randint(0, 400)])
        seeded = random.Random(self.random.getrandbits(64))
        skew = 0.0 if calm else self.random.choice([0.0, -3600.0, 86400.0])
        return Process(name, seeded, Faults() if calm else self.faults, skew, crash)

    async def supervise(self, name: str, life: Callable[[Process], Coroutine[Any, Any, bool]]) -> None:
        """Starts a process again whenever it crashes, until it ends by itself."""
        while True:
            process = self.process(name)
            task = process.start(life(process))
            died = asyncio.create_task(process.died.wait())
            await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if task.done() and not process.dead:
                if task.result():
                    return
            else:
                self.trace(f"{self.now()} {name}: crashed")
            await asyncio.sleep(self.random.expovariate(0.1))

    def now(self) -> str:
        return f"{self.loop.time():10.2f}"

    def heard(self, name: str) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            self.trace(f"{self.now()} {name}: {event.stage} {event.version} {event.message}")

        return listen

    # --- trainers ------------------------------------------------------------------------------------------------

    async def train(self, process: Process) -> bool:
        """Publishes some versions. Returns whether its life is over, for good or because another took over."""
        rng = process.random
        settings = PublisherSettings(threads=1, anchor_every=rng.choice([None, 2, 5]), retry_seconds=30.0)
        work = self.publishing(process, settings)
        try:
            await work.process.start()
        except Fenced as problem:
            self.check_fenced(work, problem)
            return True
        except BucketError as problem:
            self.trace(f"{self.now()} {process.name}: could not start ({problem.message})")
            return False
        running = process.start(work.run())
        weights = _copy(work.process.copies.published) if work.process.copies and work.process.state else _initial(rng)
        for step in range(self.versions):
            _train(weights, rng)
            pause = 0.01
            while (copies := work.process.copies) is not None and copies.busy:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 60.0)
            publication = self.publish(work, weights, step)
            await asyncio.sleep(rng.expovariate(rng.choice([0.2, 2.0, 20.0])))
            if work.context.lifecycle.failure is not None:
                self.check_fenced(work, work.context.lifecycle.failure)
                return True
        await publication.ended.wait()
        await work.close()
        await running
        await work.close()
        if work.context.lifecycle.failure is not None:
            self.check_fenced(work, work.context.lifecycle.failure)
        return True

    def publishing(self, process: Process, settings: PublisherSettings) -> PublishLoop:
        bucket, runtime = SimBucket(self.store, process), SimRuntime(process)
        context = PublishContext(bucket, runtime, settings, self.heard(process.name))
        return PublishLoop(context, SingleProcess(context))

    def publish(self, work: PublishLoop, weights: Arrays, step: int) -> Watched:
        state = self.truth.remember(weights)
        publication = Watched(step, asyncio.Event(), lambda done: self.acknowledged(done, state))
        work.capture(publication, read_weights(weights))
        work.wake()
        return publication

    def acknowledged(self, publication: Publication, state: str) -> None:
        assert publication.version is not None
        before = self.truth.acknowledged.setdefault(publication.version, state)
        if before != state:
            self.violations.append(f"version {publication.version} was acknowledged twice, with different weights")

    def check_fenced(self, work: PublishLoop, failure: WeightwireError) -> None:
        if not isinstance(failure, Fenced):
            raise Violation(f"a publisher failed: {failure!r} {failure.__cause__!r}")
        epochs = [unseal(data, Commit, "").record.epoch for path, data in self.commits()]
        claimed = [int(path[7:15]) for path in self.store.objects if path.startswith("epochs/")]
        mine = work.process.writer.epoch if work.process.writer else min(claimed)
        if not any(epoch > mine for epoch in epochs):
            raise Violation(f"epoch {mine} was fenced off, but nobody has taken over")

    def commits(self) -> list[tuple[str, bytes]]:
        return [(path, data) for path, (data, _) in sorted(self.store.objects.items()) if path.startswith("commits/")]

    # --- followers -----------------------------------------------------------------------------------------------

    async def follow(self, process: Process) -> bool:
        """Follows until the calm. An engine takes updates now and then, and must end up with the same bits."""
        directory = self.room / process.name
        replica = Replica.open(directory, threads=1)
        process.closers.append(replica.close)
        await self._follow(process, replica)
        replica.close()
        return True

    async def _follow(self, process: Process, replica: Replica) -> None:
        work = self.following(process, replica)
        running = process.start(work.run())
        died = asyncio.create_task(process.died.wait())
        engine: Arrays = {}
        while not self.calm and not process.dead:
            more = asyncio.create_task(work.wait_for_more(600.0))
            await asyncio.wait([died, running, more], return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
            await asyncio.sleep(process.random.expovariate(0.5))
            if running.done():
                running.result()
            if not process.dead:
                engine = await self.take(work, engine, process) or engine
        running.cancel()
        died.cancel()

    def following(self, process: Process, replica: Replica) -> FollowLoop:
        told = self.heard(process.name)

        def listen(event: Event) -> None:
            told(event)
            if event.stage == "apply":
                assert work.commit is not None
                self.check_replica(work, process.name)

        bucket, runtime = SimBucket(self.store, process), SimRuntime(process)
        work = FollowLoop(FollowContext(bucket, runtime, replica, listen, threads=1), process.name)
        return work

    def check_replica(self, work: FollowLoop, name: str) -> None:
        assert work.commit is not None
        try:
            self.truth.check(work.commit.record.after, work.replica.weights, name)
        except Violation as problem:
            self.violations.append(str(problem))
            raise

    async def take(self, work: FollowLoop, engine: Arrays, process: Process) -> Arrays | None:
        update = await work.take()
        if update is None:
            return None
        if update.patch is None:
            engine = _copy(work.replica.weights)
            if work.commit is None or work.commit.record.version != update.version:
                return {}  # it has gone on meanwhile; the next one tells
        elif engine:
            patch(engine, update.patch, threads=1)
        if engine:
            self.truth.check(update.state, engine, f"the engine of {process.name}")
        return engine

    # --- upkeep --------------------------------------------------------------------------------------------------

    async def tidy(self, process: Process) -> bool:
        retention = Retention(anchors=self.random.randint(1, 2), window=self.random.choice([0.0, 30.0]), grace=20.0)
        while not self.calm:
            await asyncio.sleep(process.random.expovariate(0.05))
            try:
                await sweep(SimBucket(self.store, process), SimRuntime(process), retention)
            except (BucketError, NoRun) as problem:
                self.trace(f"{self.now()} {process.name}: {problem.message}")
        return True

    # --- the whole -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        trainers = []
        for number in range(self.rivals):
            trainers.append(asyncio.create_task(self.supervise(f"trainer-{number}", self.train)))
        others = [
            asyncio.create_task(self.supervise(f"follower-{number}", self.follow)) for number in range(self.followers)
        ]
        if self.random.random() < 0.6:
            others.append(asyncio.create_task(self.supervise("upkeep", self.tidy)))
        await asyncio.gather(*trainers)
        self.calm = True
        await asyncio.sleep(3 * 3600.0)  # whatever was still under way has landed
        await asyncio.gather(*others)
        await self.check_end()

    async def check_end(self) -> None:
        if self.violations:
            raise Violation(self.violations[0])
        commits = {
            unseal(data, Commit, path).record.version: unseal(data, Commit, path) for path, data in self.commits()
        }
        if sorted(commits) != list(range(len(commits))):
            raise Violation("the chain has holes")
        for version, state in self.truth.acknowledged.items():
            if version not in commits or commits[version].record.after != state:
                raise Violation(f"version {version} was acknowledged, and is not there")
        head = commits[max(commits)] if commits else None
        if head is None or not head.record.after:
            return
        for name in [*(f"follower-{number}" for number in range(self.followers)), "late"]:
            await self.check_follower(name, head.record)
        await self.check_successor(head.record)

    async def check_follower(self, name: str, head: Commit) -> None:
        process = self.process(name)
        with Replica.open(self.room / name, threads=1) as replica:
            work = self.following(process, replica)
            await work.look()
            if work.version != head.version or work.commit is None or work.commit.record.after != head.after:
                raise Violation(f"{name}: ends at version {work.version}, not {head.version}")
            self.check_replica(work, name)
            current = await work.checkpoint()
            self.truth.check(head.after, current, f"current of {name}")

    async def check_successor(self, head: Commit) -> None:
        """A new publisher finds what was published last, and goes on from there."""
        process = self.process("successor")
        work = self.publishing(process, PublisherSettings(threads=1))
        await work.process.start()
        assert work.process.copies is not None
        assert work.process.state is not None
        self.truth.check(head.after, work.process.copies.published, "the successor")


def _initial(rng: random.Random) -> Arrays:
    bits = np.array([rng.getrandbits(16) for _ in range(128)], np.uint16)
    return {
        "layer.weight": bits.view(np.float16).reshape(8, 16),
        "norm": np.array([rng.random() for _ in range(5)], np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }


def _train(weights: Arrays, rng: random.Random) -> None:
    for name, chance in (("layer.weight", 0.05), ("norm", 0.3)):
        flat = weights[name].reshape(-1).view(f"u{weights[name].itemsize}")
        for at in range(len(flat)):
            if rng.random() < chance:
                flat[at] ^= rng.choice([1, 3, 1 << 10])


def _copy(weights: Any) -> Arrays:
    kinds = {"layer.weight": np.float16, "norm": np.float32, "empty": np.float32}
    return {name: tensor.bits.view(kinds[name]).reshape(tensor.shape).copy() for name, tensor in weights.items()}


# --- running it ------------------------------------------------------------------------------------------------------


def simulate(seed: int, trace: Callable[[str], None] = lambda line: None) -> None:
    """Runs one seed. Raises a Violation, or whatever the code raised that it should not."""
    memory = Path("/dev/shm")
    room = Path(tempfile.mkdtemp(prefix="weightwire-sim-", dir=memory if os.access(memory, os.W_OK) else None))
    loop = SimLoop()
    loop.set_exception_handler(lambda loop, context: None)
    complain, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        loop.run_until_complete(Simulation(seed, loop, room, trace).run())
    finally:
        _bury(loop)
        sys.unraisablehook = complain
        shutil.rmtree(room, ignore_errors=True)


def _bury(loop: SimLoop) -> None:
    """Tasks of crashed processes never end. What they would still do as they go comes to nothing."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        _close(task.get_coro())
    loop.close()
    gc.collect()


def _close(coroutine: Any) -> None:
    for _ in range(10):  # once for each await on its way out
        try:
            coroutine.close()
            return
        except Exception:
            continue


def attempt(seed: int) -> tuple[int, str | None]:
    try:
        simulate(seed)
    except Exception as problem:
        return seed, f"{type(problem).__name__}: {problem}"
    return seed, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    if args.seed is not None:
        simulate(args.seed, print if args.trace else lambda line: None)
        return
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor() as pool:
        for seed, problem in pool.map(attempt, range(args.first, args.first + args.seeds), chunksize=8):
            if problem:
                failed += 1
                print(f"seed {seed}: {problem}", flush=True)
    print(f"{args.seeds - failed} passed, {failed} failed, {time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
