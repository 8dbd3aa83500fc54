"""A bucket with a clock that tests set, and small runs in it, made by the real publisher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from weightwire.bucket.bucket import GET_LIMIT, Bucket, ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.chain.record_paths import heartbeat_path
from weightwire.chain.records import Heartbeat, StageTiming, seal
from weightwire.errors import PermissionDenied
from weightwire.publisher.publisher import Publisher
from weightwire.system.runtime import Runtime
from weightwire.telemetry.events import Event

__all__ = [
    "HOUR",
    "Arrays",
    "Clocked",
    "beat",
    "clocked",
    "copied",
    "finish_background",
    "first_weights",
    "publish",
    "run",
    "stepped",
]

HOUR = 3600.0
Arrays = dict[str, npt.NDArray[Any]]
Strings = list[str]
Numbers = list[int]
Hook = Callable[[str, str], Awaitable[None]]
Result = TypeVar("Result")


class Clocked:
    """A bucket that dates objects by `now`. `log` lists writes and deletes."""

    def __init__(self, bucket: Bucket, now: float = 1e6) -> None:
        self.inner = bucket
        self.url, self.strict, self.poll_interval = bucket.url, bucket.strict, bucket.poll_interval
        self.now = now
        self.times: dict[str, float] = {}
        self.log: list[tuple[str, str]] = []
        self.read_only = False
        self.hidden: set[str] = set()  # from listings
        self.hook: Hook | None = None  # called before each read

    async def create(self, path: str, data: bytes) -> None:
        self._note("create", path)
        await self.inner.create(path, data)
        self.times[path] = self.now

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        self._note("put", path)
        await self.inner.put(path, data, size)
        self.times[path] = self.now

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        if self.hook:
            await self.hook("get", path)
        return await self.inner.get(path, limit)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        await self.inner.read_into(path, buffer, start)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        if self.hook:
            await self.hook("list", prefix)
        return [self._dated(one) for one in await self.inner.list(prefix) if one.path not in self.hidden]

    async def find(self, path: str) -> ObjectInfo | None:
        if self.hook:
            await self.hook("find", path)
        found = await self.inner.find(path)
        return found and self._dated(found)

    async def delete(self, path: str) -> None:
        self._note("delete", path)
        await self.inner.delete(path)

    async def close(self) -> None:
        await self.inner.close()

    def _dated(self, one: ObjectInfo) -> ObjectInfo:
        return replace(one, modified=self.times.get(one.path, self.now))

    def _note(self, verb: str, path: str) -> None:
        if self.read_only:
            raise PermissionDenied(f"{path}: read only")
        self.log.append((verb, path))

    def paths(self, prefix: str = "") -> Strings:
        return [one.path for one in run(self.inner.list(prefix))]

    def versions(self, folder: str) -> Numbers:
        return sorted({int(path.split("/")[1]) for path in self.paths(f"{folder}/")})

    def write(self, path: str, data: bytes) -> None:
        """Writes an object directly, as another program would."""
        run(self.put(path, data))


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def clocked() -> Clocked:
    """An empty clocked bucket."""
    return Clocked(open_bucket(f"memory://{Runtime().token()}"))


def copied(bucket: Clocked) -> Clocked:
    """A copy in memory, for a test that may change it. Publishing the same versions again takes ten times as long."""
    copy = clocked()
    copy.now, copy.times, copy.log = bucket.now, dict(bucket.times), [*bucket.log]

    async def copy_all() -> None:
        for one in await bucket.inner.list(""):
            await copy.inner.create(one.path, await bucket.inner.get(one.path))

    run(copy_all())
    return copy


def first_weights(seed: int = 7) -> Arrays:
    random = np.random.default_rng(seed)
    weights: Arrays = {"a.weight": random.normal(0, 1, (32, 16)).astype(np.float32)}
    return weights | {"b": random.normal(0, 1, 40).astype(np.float16)}


def stepped(weights: Arrays, step: int) -> Arrays:
    changed = {name: array.copy() for name, array in weights.items()}
    changed["a.weight"].view(np.uint32).reshape(-1)[step % 7 :: 50] += 1
    return changed


def publish(
    bucket: Bucket,
    weights: Arrays,
    steps: int,
    *,
    every: float = 0.0,
    clock: Clocked | None = None,
    **settings: Any,
) -> Arrays:
    """Starts a publisher, publishes versions `every` so many seconds, and closes it. Returns the last weights.

    In an empty run, version 0 is the fence and version 1 the first that is published.
    """

    def quiet(event: Event) -> None:
        pass

    with Publisher(bucket, blocking=True, on_event=quiet, threads=1, **settings) as publisher:
        for step in range(steps):
            if clock is not None:
                clock.now += every
            publisher.publish(weights, step=step, metrics={"reward": step / 2})
            finish_background(publisher)
            last, weights = weights, stepped(weights, step)
    return last


def finish_background(publisher: Publisher) -> None:
    """Waits for background work: while an anchor is written, no other one is begun."""

    async def finish() -> None:
        await publisher._context.background.wait()

    publisher._background.call(finish())


def beat(run_id: str, name: str, version: int, *, lease: float = 60.0, **fields: Any) -> tuple[str, bytes]:
    """The path and the content of a heartbeat."""
    stages = {"fetch": StageTiming(0.25, 1000), "apply": StageTiming(0.01)}
    record = Heartbeat(run=run_id, name=name, version=version, head=version, lease=lease, stages=stages, **fields)
    return heartbeat_path(name), seal(record).data
