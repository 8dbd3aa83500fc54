"""A runtime and a bucket with faults, all from one seed: virtual time, crashes, lost replies, requests that land late.

The code that runs in it is the real one. A process that crashes never comes back from the await it is in; what it had
asked of the bucket may still happen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weightwire.bucket.bucket import ObjectInfo
from weightwire.errors import AlreadyExists, BucketError, NotFound, Unavailable
from weightwire.system.runtime import Runtime

Result = TypeVar("Result")

EPOCH = 1_700_000_000.0


class Deadlock(Exception):
    """Nothing is left that could happen."""


class _Clock:
    """In place of a selector: waiting is moving the clock."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock
        self._loop.now += max(timeout, 0.0)
        return []

    def close(self) -> None:
        pass


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes only when everybody waits."""

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
    """How likely each is, per request. `landing`: of a failed write, that it happens all the same."""

    failed: float = 0.0
    lost: float = 0.0
    landing: float = 0.0
    slow: float = 0.0
    pause: float = 0.0


@dataclass(eq=False)
class Process:
    """What can crash as one: all its tasks stop where they are."""

    name: str
    random: random.Random
    faults: Faults
    skew: float = 0.0
    crash_at: int | None = None  # steps from now
    dead: bool = False
    died: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    closers: list[Callable[[], None]] = field(default_factory=list)  # what the system does for a process that is gone

    async def step(self) -> None:
        """Every await of the code under test passes through here."""
        if self.crash_at is not None and not self.dead:
            self.crash_at -= 1
            if self.crash_at < 0:
                self.kill()
        if not self.dead and self.random.random() < self.faults.pause:
            await asyncio.sleep(self.random.uniform(60, 4 * 3600))
        if self.dead:
            await asyncio.Future()

    def kill(self) -> None:
        self.dead = True
        self.died.set()
        for close in self.closers:
            close()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task


class SimRuntime(Runtime):
    """Threads run at once, and take a little virtual time."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.random = process.random
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return EPOCH + self._loop.time() + self.process.skew

    def clock(self) -> float:
        return self._loop.time()

    async def run_in_thread(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        await self.process.step()
        await asyncio.sleep(self.random.expovariate(20))
        await self.process.step()
        result = function(*args, **kwargs)
        await self.process.step()
        return result


@dataclass
class Store:
    """What is in the bucket, for all processes; and what was ever created there."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    created: dict[str, bytes] = field(default_factory=dict)

    def now(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    def create(self, path: str, data: bytes) -> None:
        if path in self.objects:
            raise AlreadyExists(f"{path}: exists")
        assert self.created.setdefault(path, data) == data or not path.startswith("commits/"), f"{path}: two histories"
        self.objects[path] = data, self.now()

    def put(self, path: str, data: bytes) -> None:
        assert not path.startswith(("commits/", "epochs/", "gc/")), f"{path}: overwritten"
        self.objects[path] = data, self.now()


class SimBucket:
    """One process's way to the store."""

    strict = True
    poll_interval = 0.2
    url = "sim://bucket"

    def __init__(self, store: Store, process: Process) -> None:
        self.store = store
        self.process = process

    async def create(self, path: str, data: bytes) -> None:
        def act() -> None:
            self.store.create(path, data)

        await self._write(act, path)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        whole = data if isinstance(data, bytes) else b"".join(data)
        assert size is None or size == len(whole)
        await self._write(lambda: self.store.put(path, whole), path)

    async def get(self, path: str) -> bytes:
        def act() -> bytes:
            if path not in self.store.objects:
                raise NotFound(f"{path}: is not there")
            return self.store.objects[path][0]

        return await self._read(act)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        data = await self.get(path)
        if len(data) < start + len(buffer):
            raise BucketError(f"{path}: is too short")
        buffer[:] = data[start : start + len(buffer)]

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        def act() -> list[ObjectInfo]:
            found = sorted(path for path in self.store.objects if path.startswith(prefix))
            return [self._object(path) for path in found]

        return await self._read(act)

    async def find(self, path: str) -> ObjectInfo | None:
        return await self._read(lambda: self._object(path) if path in self.store.objects else None)

    async def delete(self, path: str) -> None:
        assert not path.startswith(("commits/", "epochs/", "gc/", "run.json", "files/")), f"{path}: deleted"
        await self._write(lambda: self.store.objects.pop(path, None), path)

    async def close(self) -> None:
        pass

    def _object(self, path: str) -> ObjectInfo:
        data, modified = self.store.objects[path]
        return ObjectInfo(path, len(data), modified)

    async def _read(self, act: Callable[[], Result]) -> Result:
        await self._travel()
        if self._happens(self.process.faults.failed):
            raise Unavailable("the request failed")
        result = act()
        await self._travel()
        return result

    async def _write(self, act: Callable[[], object], path: str) -> None:
        await self._travel()
        faults = self.process.faults
        if self._happens(faults.failed):
            if self._happens(faults.landing):
                delay = self.process.random.choice([0.01, 1.0, 60.0, 7200.0]) * self.process.random.random()
                asyncio.get_running_loop().call_later(delay, _anyhow, act)
            raise Unavailable(f"{path}: the request failed")
        # From here on it happens, whether or not the process lives to see it.
        act()
        await self._travel()
        if self._happens(faults.lost):
            if path.startswith(("commits/", "epochs/", "run.json")) and self._happens(0.5):
                raise AlreadyExists(f"{path}: the client's own second try found the first")
            raise Unavailable(f"{path}: the reply was lost")

    async def _travel(self) -> None:
        await self.process.step()
        random = self.process.random
        seconds = random.expovariate(50)
        if self._happens(self.process.faults.slow):
            seconds += random.expovariate(0.2)
        await asyncio.sleep(seconds)
        await self.process.step()

    def _happens(self, chance: float) -> bool:
        return self.process.random.random() < chance


def _anyhow(act: Callable[[], object]) -> None:
    with suppress(AlreadyExists):
        act()
