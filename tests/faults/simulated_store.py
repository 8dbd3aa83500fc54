"""A bucket with faults from one seed: lost replies, late requests, wrong bits, and views that lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from faults.simulated_runtime import EPOCH, Process, View
from weightwire.bucket.bucket import GET_LIMIT, ObjectInfo
from weightwire.errors import AlreadyExists, BucketError, NotFound, Unavailable

Result = TypeVar("Result")
Objects = dict[str, tuple[bytes, float]]  # by path: the bytes and when they were written

_DATA = ("deltas/", "anchors/")


class Watch:
    """Is told of every change of a store, before it happens. See `store_rules`."""

    def creates(self, store: Store, path: str, data: bytes, who: Process) -> None:
        pass

    def puts(self, store: Store, path: str, data: bytes, who: Process, late: bool) -> None:
        pass

    def looks(self, store: Store, path: str, who: Process) -> None:
        """A process asks whether an object exists."""

    def wants_to_delete(self, who: Process) -> object:
        """Called when the request is sent. The result is passed to `deletes`, when it takes effect."""
        return None

    def deletes(self, store: Store, path: str, who: Process, ticket: object) -> None:
        pass


@dataclass
class Store:
    """The objects of the bucket, shared by all processes, and everything that was ever created."""

    objects: Objects = field(default_factory=dict)
    created: dict[str, bytes] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    snapshots: list[Objects] = field(default_factory=list)  # before each commit
    is_refused = False  # see `View`

    def now(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    def create(self, path: str, data: bytes, who: Process) -> None:
        if path in self.objects:
            raise AlreadyExists(f"{path}: exists")
        self.watch.creates(self, path, data, who)
        if path.startswith("commits/"):
            self.snapshots.append(dict(self.objects))
        self.created[path] = data
        self.objects[path] = data, self.now()

    def put(self, path: str, data: bytes, who: Process, *, late: bool = False) -> None:
        self.watch.puts(self, path, data, who, late)
        self.objects[path] = data, self.now()

    def delete(self, path: str, who: Process, ticket: object) -> None:
        self.watch.deletes(self, path, who, ticket)
        self.objects.pop(path, None)

    def find(self, path: str) -> tuple[bytes, float] | None:
        return self.objects.get(path)

    def creates(self, path: str) -> bool:
        return path not in self.objects

    def keeps(self, path: str, data: bytes) -> bool:
        return False

    def paths(self, prefix: str) -> list[str]:
        return [path for path in self.objects if path.startswith(prefix)]

    def latest(self, prefix: str) -> list[tuple[str, bytes]]:
        """The objects of a folder, in the order of their names."""
        return [(path, self.objects[path][0]) for path in sorted(self.paths(prefix))]


class SimBucket:
    """One process's connection to the store.

    `on_request` is called before each read, `on_get` with each object and `on_data` with each data file that was read,
    and `on_put` before each put.
    """

    strict = True
    poll_interval = 0.2
    url = "sim://bucket"

    def __init__(self, store: Store, process: Process) -> None:
        self.store = store
        self.process = process
        self.on_request: Callable[[], None] = lambda: None
        self.on_get: Callable[[str, bytes], None] = lambda path, data: None
        self.on_data: Callable[[str, bytes], None] = lambda path, data: None
        self.on_put: Callable[[str, bytes], None] = lambda path, data: None

    async def create(self, path: str, data: bytes) -> None:
        def act(late: bool) -> None:
            if not self._view.creates(path):
                raise AlreadyExists(f"{path}: exists")
            if not self._view.keeps(path, data):
                self.store.create(path, data, self.process)

        await self._write("create", path, act)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        whole = data if isinstance(data, bytes) else b"".join(data)
        assert size is None or size == len(whole)
        self.on_put(path, whole)
        await self._write("put", path, lambda late: self.store.put(path, whole, self.process, late=late))

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        def act() -> bytes:
            found = self._view.find(path)
            if found is None:
                raise NotFound(f"{path}: is not there")
            self.on_get(path, found[0])
            return found[0]

        return await self._read("get", path, act)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        if self.process.delay:
            await asyncio.sleep(self.process.delay * self.process.random.random())
        data = await self.get(path)
        if len(data) < start + len(buffer):
            raise BucketError(f"{path}: is too short")
        if self._happens(self.process.faults.rotten):
            data = flipped(data, self.process.random.randrange(8 * len(data)))
        self.on_data(path, data)
        buffer[:] = data[start : start + len(buffer)]

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        def act() -> list[ObjectInfo]:
            view = self._view
            return [found for path in sorted(view.paths(prefix)) if (found := _info(view, path))]

        return await self._read("list", prefix, act)

    async def find(self, path: str) -> ObjectInfo | None:
        def act() -> ObjectInfo | None:
            self.store.watch.looks(self.store, path, self.process)
            return _info(self._view, path)

        return await self._read("find", path, act)

    async def delete(self, path: str) -> None:
        ticket = self.store.watch.wants_to_delete(self.process)
        await self._write("delete", path, lambda late: self.store.delete(path, self.process, ticket))

    async def close(self) -> None:
        pass

    @property
    def _view(self) -> View:
        return self.process.view() or self.store

    async def _read(self, operation: str, path: str, act: Callable[[], Result]) -> Result:
        self.on_request()
        await self.process.step()  # the way there and back is one wait: the result may be old when it arrives
        await self.process.meet(operation, path)
        if self._happens(self.process.faults.failed):
            raise Unavailable("the request failed")
        result = act()
        await self._travel()
        return result

    async def _write(self, operation: str, path: str, act: Callable[[bool], object]) -> None:
        await self._travel()
        await self.process.meet(operation, path)
        faults, random = self.process.faults, self.process.random
        if self._happens(faults.failed):
            if self._happens(faults.landing):
                delay = random.choice([0.01, 1.0, 60.0, 600.0]) * random.random()
                loop = asyncio.get_running_loop()
                faults.lasts_until(loop.time() + delay)
                loop.call_later(delay, _land, act)
            raise Unavailable(f"{path}: the request failed")
        # The write takes effect, even if the process crashes now.
        act(False)
        await self.process.meet(operation, path, after=True)
        await self._travel()
        if self._happens(faults.lost):
            if operation == "create" and self._happens(0.5):
                raise AlreadyExists(f"{path}: the client's own retry found the first attempt")
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
        return chance > 0 and self.process.random.random() < chance


def _info(view: View, path: str) -> ObjectInfo | None:
    found = view.find(path)
    return None if found is None else ObjectInfo(path, len(found[0]), found[1])


def flipped(data: bytes, bit: int) -> bytes:
    wrong = bytearray(data)
    wrong[bit // 8] ^= 1 << bit % 8
    return bytes(wrong)


def is_data(path: str) -> bool:
    return path.startswith(_DATA)


def _land(act: Callable[[bool], object]) -> None:
    with suppress(AlreadyExists):
        act(True)
