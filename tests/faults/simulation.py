"""Publishers, followers and upkeep with simulated faults: the real code, and one seed for all faults.

    python tests/faults/simulation.py --seeds 10000          # many seeds, in order
    python tests/faults/simulation.py --seed 4711 --trace    # replay one seed

Each seed chooses which faults happen: failed, lost and late requests, crashes at every await and at every step that
writes a file, power cuts, pauses at the worst moment, rotten data, and stores that lie. Checked promises:

- no follower or engine ever holds wrong bits, accepts a version that nobody published, goes back, or loses a version;
- no follower with trusted keys accepts what no key in force has signed, goes back before a version that it has seen,
  or accepts anything without a recent sign of life if it demands one; and no publisher continues such a history;
- no acknowledged version is lost, there is one history, and no publisher is fenced off without a successor;
- data exists before a record names it, and nothing is deleted that a lease, the grace period or retention keeps;
- once the faults end, all followers catch up by themselves, and one complete path is enough for it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to run it as a script

from faults.final_checks import FinalChecks
from faults.simulated_disk import SimDisk
from faults.simulated_follower import SimFollower, follower_ambush, slow_reader_ambush
from faults.simulated_keeper import SimKeeper
from faults.simulated_keys import SimKeys
from faults.simulated_runtime import Ambush, Faults, Livelock, Process, SimLoop
from faults.simulated_sweeper import SimSweeper, sweeper_ambush
from faults.simulated_trainer import SimTrainer, publisher_ambush, rival_ambush
from faults.simulated_world import Violation, World
from faults.store_rules import are_all_revoked
from faults.tampering import Tamperer
from weightwire.follower import replica_updater
from weightwire.upkeep.retention import Retention

_CATCH_UP = 2 * 3600.0  # seconds that followers have after the faults end; damaged files are tried every 10 minutes

_LONGEST_WORK = 60.0  # seconds of processor time

_START = 1.0  # seconds in which rivals start


class Simulation:
    """The story of one seed."""

    def __init__(self, seed: int, loop: SimLoop, room: Path, trace: Callable[[str], None]) -> None:
        rng = self.random = random.Random(seed)
        chance = rng.random
        faults = Faults(
            failed=0.1 * chance() if chance() < 0.6 else 0.0,
            lost=0.1 * chance() if chance() < 0.6 else 0.0,
            landing=0.5,
            slow=0.05 * chance(),
            pause=0.002 * chance() if chance() < 0.3 else 0.0,
            rotten=0.2 * chance() if chance() < 0.25 else 0.0,
            disk=0.3 * chance() if chance() < 0.25 else 0.0,
        )
        # Large replicas renew `current` beside the next versions.
        replica_updater._SMALL = random.Random(f"small {seed}").choice([0, 64 << 20])
        on_tmpfs = str(room).startswith("/dev/shm/")
        self.world = World(
            rng,
            loop,
            room,
            trace,
            faults,
            crashes=chance() < 0.6,
            power=on_tmpfs,
            model=rng.choice([8, 256, 256, 1024]),
            pushes=random.Random(f"pushes {seed}").random() < 0.5,
        )
        if chance() < 0.4:
            self.world.keys = SimKeys(random.Random(rng.getrandbits(64)), has_ages=chance() < 0.5)
        self.ambushes = chance() < 0.6
        self.rots = chance() < 0.15
        self.lies = rng.choice([0, 2, 3, 4] if self.world.keys else [0, 0, 2, 3])
        self.world.rules.retention = Retention(
            anchors=rng.randint(1, 2),
            window=rng.choice([0.0, 0.0, 30.0, 120.0]),
            grace=rng.choice([0.0, 5.0, 20.0, 60.0]),
        )
        self.followers = [SimFollower(self.world, f"follower-{number}") for number in range(rng.randint(1, 3))]
        self.lives: list[asyncio.Task[None]] = []
        # A slow reader, while nothing but its lease holds back upkeep. (Drawn apart, so that other stories stay.)
        self.has_slow_reader = random.Random(f"slow reader {seed}").random() < 0.1
        if self.has_slow_reader:
            self.world.rules.retention = Retention(anchors=1, window=0.0, grace=0.0)
            faults.failed = max(faults.failed, 0.08)  # after a crash it may not find its version at once
        # Trainers that start at the same moment, each slow at the worst one.
        self.has_rivals = random.Random(f"rivals {seed}").random() < 0.1

    async def supervise(
        self,
        name: str,
        life: Callable[[Process], Coroutine[Any, Any, bool]],
        ambush: Callable[[random.Random], Ambush],
        delay: float = 0.0,
    ) -> None:
        """Restarts a process after each crash, until it ends normally."""
        world = self.world
        await asyncio.sleep(delay)
        while True:
            trap = ambush(self.random) if self.ambushes and self.random.random() < 0.5 else None
            if self.has_slow_reader and name == self.followers[0].name:
                trap = slow_reader_ambush(self.random)
            if self.has_rivals and ambush is publisher_ambush and self.world.loop.time() < _START:
                trap = rival_ambush(self.random)
            process = world.process(name, trap)
            task = process.start(life(process))
            died = asyncio.create_task(process.died.wait())
            await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if task.done() and not process.dead:
                if task.result():
                    return
            else:
                world.trace(f"{world.now()} {name}: crashed")
            if self.rots and self.random.random() < 0.3:
                world.rotted.add(name)
            await asyncio.sleep(self.random.expovariate(0.1))

    def join(self, name: str, delay: float = 0.0) -> SimFollower:
        """Starts a new follower."""
        follower = SimFollower(self.world, name)
        self.followers.append(follower)
        self.lives.append(asyncio.create_task(self.supervise(name, follower.live, follower_ambush, delay)))
        return follower

    async def hire(self, name: str) -> None:
        """A new trainer publishes a few versions."""
        trainer = SimTrainer(self.world, name, self.random.randint(1, 3))
        await self.supervise(name, trainer.live, publisher_ambush)

    async def run(self) -> None:
        """Ends when the story is over, or with the first broken promise."""
        story = asyncio.create_task(self._tell())
        broken = asyncio.create_task(self.world.broken.wait())
        await asyncio.wait([story, broken], return_when=asyncio.FIRST_COMPLETED)
        if self.world.violations:
            raise Violation(self.world.violations[0])
        story.result()

    async def _tell(self) -> None:
        world, rng = self.world, self.random
        for follower in self.followers:
            delay = rng.choice([0.0, 0.0, 30.0])
            self.lives.append(asyncio.create_task(self.supervise(follower.name, follower.live, follower_ambush, delay)))
        trainers = []
        for number in range(1 + (rng.random() < 0.5) + (rng.random() < 0.2) + self.has_rivals):
            trainer = SimTrainer(world, f"trainer-{number}", rng.randint(3, 12))
            if self.has_slow_reader:
                trainer.versions, trainer.pace, trainer.anchor_every = 15, 5.0, 2
            delay = 0.0 if self.has_rivals else rng.choice([0.0, 0.0, 10.0])
            trainers.append(self.supervise(trainer.name, trainer.live, publisher_ambush, delay))
        sweeper = SimSweeper(world)
        if rng.random() < 0.6 or self.has_slow_reader:
            sweeper.pace = 3.0 if self.has_slow_reader else sweeper.pace
            self.lives.append(asyncio.create_task(self.supervise(sweeper.name, sweeper.live, sweeper_ambush)))
        if rng.random() < 0.3:
            self.join("joiner", rng.uniform(0, 100))
        if world.keys is not None and rng.random() < 0.7:
            trainers.append(self._change_keys(rng.uniform(0, 25)))
        tamperer = Tamperer(world, self.followers[:], self.join, self.hire)
        if world.keys is not None and rng.random() < 0.1:
            trainers.append(tamperer.lie_at_start("trainer-0"))
        await self._all(*trainers, tamperer.work(self.lies))
        await self._end(sweeper)

    async def _change_keys(self, delay: float) -> None:
        """Replaces the key. The trainer is locked out, so another one goes on with the new key."""
        keeper = SimKeeper(self.world)
        await self.supervise(keeper.name, keeper.live, publisher_ambush, delay)
        await self.hire("trainer-new")

    async def _show_life(self) -> SimTrainer:
        """A trainer that publishes a version, and then shows signs of life."""
        trainer = SimTrainer(self.world, "trainer-last", 1)
        trainer.is_stray, trainer.stays = False, asyncio.Event()
        self.lives.append(asyncio.create_task(self.supervise(trainer.name, trainer.live, publisher_ambush)))
        await self._all(asyncio.sleep(60.0))
        return trainer

    async def _end(self, sweeper: SimSweeper) -> None:
        """All faults end. The followers that are running catch up by themselves."""
        world = self.world
        world.calm = True
        world.faults.end()
        for follower in self.followers:
            if follower.process is not None:
                follower.process.delay, follower.process.crash_at, follower.process.ambush = 0.0, None, None
            if follower.name in world.disks:
                world.disks[follower.name].fuse = None
            follower.leaves = False
        sweeper.stop.set()
        await self._all(asyncio.sleep(max(world.faults.busy_until - world.loop.time(), 0.0) + 60.0))
        needs_trainer = world.keys is not None and (world.keys.has_ages or are_all_revoked(world.store))
        last = await self._show_life() if needs_trainer else None
        final = FinalChecks(world, self.followers, self.random)
        await self._all(final.check_caught_up(_CATCH_UP))
        for follower in self.followers:
            follower.stop.set()
        await self._all(*(life for life in self.lives if last is None or life is not self.lives[-1]))
        await final.check_end()

    async def _all(self, *works: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        """Waits for all, and raises the first error at once, also of a follower or the sweeper."""
        tasks = [asyncio.ensure_future(work) for work in works]
        pending = set(tasks)
        while pending:
            watched = pending | {life for life in self.lives if not life.done()}
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done


# --- running it ------------------------------------------------------------------------------------------------------


def simulate(seed: int, trace: Callable[[str], None] = lambda line: None) -> None:
    """Runs one seed. Raises a Violation, or an unexpected error of the code."""
    memory = Path("/dev/shm")
    room = Path(tempfile.mkdtemp(prefix="weightwire-sim-", dir=memory if os.access(memory, os.W_OK) else None))
    loop = SimLoop()
    loop.set_exception_handler(lambda loop, context: None)
    complain, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with _one_thread(seed), SimDisk.watching():
            loop.run_until_complete(_run(seed, loop, room, trace))
    finally:
        _bury(loop)
        sys.unraisablehook = complain
        shutil.rmtree(room, ignore_errors=True)


async def _run(seed: int, loop: SimLoop, room: Path, trace: Callable[[str], None]) -> None:
    await Simulation(seed, loop, room, trace).run()


@contextmanager
def _one_thread(seed: int) -> Iterator[None]:
    """Runs work that must not be interrupted in this thread, and names directories by the seed."""
    tokens = random.Random(seed)

    def to_the_end(work: Callable[[threading.Event], Any]) -> Any:
        return work(threading.Event())

    modules = ("replica.replica", "publisher.host_copies", "publisher.copy_advance")
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch(f"weightwire.{module}.to_the_end", to_the_end))
        patches.enter_context(mock.patch.object(secrets, "token_hex", lambda size: tokens.randbytes(size).hex()))
        yield


def _bury(loop: SimLoop) -> None:
    """Cancels the tasks of crashed processes, which never end, without effects on the store."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        _close(task.get_coro())
    loop.close()
    gc.collect()


def _close(coroutine: Any) -> None:
    for _ in range(10):  # once per await during the cancellation
        try:
            coroutine.close()
            return
        except BaseException:
            continue


def attempt(seed: int) -> tuple[int, str | None]:
    """Returns the seed and what went wrong. Code that never awaits again is stopped after some seconds of work."""
    gc.freeze()  # so that each collection looks only at this seed
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGVTALRM, _hang)
        signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_WORK)
    try:
        simulate(seed)
    except Exception as problem:
        return seed, f"{type(problem).__name__}: {problem}"
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return seed, None


def _hang(number: int, frame: Any) -> None:
    raise Livelock(f"no await for {_LONGEST_WORK:g} s")


def _attempts(seeds: range, processes: int | None) -> Iterator[tuple[int, str | None]]:
    if processes == 1:
        yield from map(attempt, seeds)
        return
    with ProcessPoolExecutor(processes) as pool:
        try:
            yield from pool.map(attempt, seeds, chunksize=8)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--processes", type=int)
    args = parser.parse_args()
    if args.seed is not None:
        simulate(args.seed, print if args.trace else lambda line: None)
        return
    began, failed, tried = time.monotonic(), 0, 0
    for seed, problem in _attempts(range(args.first, args.first + args.seeds), args.processes):
        tried += 1
        if problem:
            failed += 1
            print(f"seed {seed}: {problem}", flush=True)
            if args.stop:
                break
    seconds = time.monotonic() - began
    rate = 60 * tried / seconds
    print(f"{tried - failed} passed, {failed} failed, {seconds:.0f} s, {rate:.0f} seeds per minute")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
