"""A runtime whose faults come from one seed: virtual time, crashes, pauses and ambushes at the worst moment.

The tested code is the real one. A crashed process never returns from its current await, but its requests may still
take effect.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from faults.simulated_disk import SimDisk
from weightwire.system.runtime import Runtime

Result = TypeVar("Result")

EPOCH = 1_700_000_000.0
_MOST_TURNS = 300_000  # of the event loop, in one seed
_LONGEST = 40 * 86400.0  # virtual seconds


class Deadlock(Exception):
    """All tasks wait, and no timer is left."""


class Livelock(Exception):
    """The tasks are busy, and never come to an end."""


class _Clock:
    """Replaces the selector: waiting advances the clock."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock
        self._turns += 1
        if self._turns > _MOST_TURNS or self._loop.now > _LONGEST:
            raise Livelock(f"{self._turns} turns, {self._loop.now:.0f} s")
        if timeout > 0:
            self._loop.now += timeout
        return []

    def close(self) -> None:
        pass


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes only while all tasks wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _Clock(self)

    def time(self) -> float:
        return self.now

    def _process_events(self, events: Sequence[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@dataclass
class Faults:
    """Probabilities per request. `landing` is the chance that a failed write still takes effect.

    `rotten` is the chance that a read of data has a wrong bit. `busy_until` is when the last late effect is over.
    """

    failed: float = 0.0
    lost: float = 0.0
    landing: float = 0.0
    slow: float = 0.0
    pause: float = 0.0
    rotten: float = 0.0
    disk: float = 0.0  # per flush of a memory map
    busy_until: float = 0.0

    def ease(self) -> None:
        """Fewer requests fail from now on."""
        self.failed, self.lost = self.failed / 2, self.lost / 2

    def end(self) -> None:
        self.failed = self.lost = self.landing = self.slow = self.pause = self.rotten = self.disk = 0.0

    def lasts_until(self, moment: float) -> None:
        self.busy_until = max(self.busy_until, moment)


_LONG = {"make_beside"}  # takes seconds for a large model, in which everything else goes on


@dataclass
class Ambush:
    """Strikes at a request of a kind, before or after it takes effect: a crash, or a pause of so many seconds.

    Strikes once, or each time if it `stays`.
    """

    operation: str
    prefix: str
    after: bool
    skip: int = 0
    pause: float | None = None
    stays: bool = False


class View(Protocol):
    """What a process sees instead of the real objects of the store. A follower must accept nothing if `is_refused`."""

    @property
    def is_refused(self) -> bool: ...

    def find(self, path: str) -> tuple[bytes, float] | None: ...

    def paths(self, prefix: str) -> list[str]: ...

    def creates(self, path: str) -> bool: ...

    def keeps(self, path: str, data: bytes) -> bool: ...


@dataclass(eq=False)
class Process:
    """A unit that crashes as a whole: all its tasks stop where they are."""

    name: str
    random: random.Random
    faults: Faults
    skew: float = 0.0
    crash_at: int | None = None  # steps from now
    ambush: Ambush | None = None
    delay: float = 0.0  # seconds of every read of data
    disk: SimDisk | None = None
    view: Callable[[], View | None] = lambda: None
    dead: bool = False
    interrupted: bool = False  # it crashed or paused since this was last cleared
    asleep_until: float = 0.0
    died: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)  # cleanup by the operating system after a crash

    async def step(self) -> None:
        """Called at every await of the tested code."""
        if self.crash_at is not None and not self.dead:
            self.crash_at -= 1
            if self.crash_at < 0:
                self.kill()
        if self.faults.pause and not self.dead and self.random.random() < self.faults.pause:
            await self.sleep_through(self.random.choice([60.0, 70.0, 600.0]) * self.random.random())
        if self.dead:
            await asyncio.Future()

    async def meet(self, operation: str, path: str, *, after: bool = False) -> None:
        """Called before and after each request takes effect."""
        ambush = self.ambush
        if ambush is None or self.dead or (operation, after) != (ambush.operation, ambush.after):
            return
        if not path.startswith(ambush.prefix):
            return
        ambush.skip -= 1
        if ambush.skip >= 0:
            return
        self.ambush = ambush if ambush.stays else None
        if ambush.pause is None:
            self.kill()
            await self.step()
        else:
            await self.sleep_through(ambush.pause)

    async def sleep_through(self, seconds: float) -> None:
        self.interrupted = True
        end = asyncio.get_running_loop().time() + seconds
        self.asleep_until = max(self.asleep_until, end)
        self.faults.lasts_until(end)
        await asyncio.sleep(seconds)

    def kill(self) -> None:
        if self.dead:
            return
        self.dead = self.interrupted = True
        if self.disk is not None:
            self.disk.crash()
        self.died.set()
        for close in self.closers:
            close()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task


class SimRuntime(Runtime):
    """Runs thread functions inline, with a little virtual time."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.random = process.random
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return EPOCH + self._loop.time() + self.process.skew

    def clock(self) -> float:
        return self._loop.time()

    async def run_in_thread(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        process = self.process
        name = getattr(function, "__name__", "")
        await process.step()
        await process.meet("thread", name)
        await asyncio.sleep(self.random.expovariate(20))
        await process.step()
        result: list[Result] = []
        with process.disk.in_use() if process.disk else nullcontext():
            try:
                result.append(function(*args, **kwargs))
            except BaseException:
                if not (process.disk and process.disk.is_down):
                    raise
        if process.disk and process.disk.is_down:  # whatever the code made of it
            process.kill()
        if name in _LONG:
            await asyncio.sleep(self.random.expovariate(0.2))
        await process.meet("thread", name, after=True)
        await process.step()
        return result[0]
