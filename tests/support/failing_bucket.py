"""A bucket that records requests and fails on demand, and an event loop that runs 1000 times faster."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from weightwire.bucket.bucket import GET_LIMIT, Bucket, ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, NotFound, PermissionDenied, Unavailable
from weightwire.system.runtime import Runtime

__all__ = ["Quick", "Troubled", "conflicting", "denied", "failed", "in_memory", "lost", "missing", "quickly", "slow"]

Result = TypeVar("Result")
Act = Callable[[], Awaitable[Any]]
Trouble = Callable[[Act], Awaitable[Any]]
"""Handles a request: performs it, raises, or both."""

SPEED = 1000


# --- failures ----------------------------------------------------------------------------------------------------


async def failed(act: Act) -> Any:
    """The request never arrives."""
    raise Unavailable("the request failed")


async def lost(act: Act) -> Any:
    """The request succeeds, but the reply is lost."""
    await act()
    raise Unavailable("the reply was lost")


async def conflicting(act: Act) -> Any:
    """The request succeeds, the reply is lost, and the client's retry finds its own object."""
    await act()
    raise AlreadyExists("exists")


async def denied(act: Act) -> Any:
    raise PermissionDenied("this key may not do that")


async def missing(act: Act) -> Any:
    raise NotFound("not found")


def slow(seconds: float) -> Trouble:
    async def wait(act: Act) -> Any:
        await asyncio.sleep(seconds)
        return await act()

    return wait


# --- the bucket --------------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    verbs: tuple[str, ...]
    prefix: str
    what: Trouble
    times: float


class Troubled:
    """A `Bucket` that forwards requests to another one, except those that a test redirects."""

    def __init__(self, inner: Bucket) -> None:
        self.inner = inner
        self.url = inner.url
        self.strict, self.poll_interval = inner.strict, inner.poll_interval
        self.asked: list[tuple[str, str]] = []
        """Verb and path of every request."""
        self._plans: list[_Plan] = []

    def trouble(self, verbs: str, prefix: str, what: Trouble, times: float = 1) -> None:
        """Redirects the next requests with these verbs ("create put") and this path prefix to `what`."""
        self._plans.append(_Plan(tuple(verbs.split()), prefix, what, times))

    def calm(self) -> None:
        self._plans.clear()

    def count(self, verb: str, prefix: str = "") -> int:
        return sum(asked == verb and path.startswith(prefix) for asked, path in self.asked)

    async def create(self, path: str, data: bytes) -> None:
        await self._do("create", path, lambda: self.inner.create(path, data))

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        await self._do("put", path, lambda: self.inner.put(path, data, size))

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        return await self._do("get", path, lambda: self.inner.get(path, limit))

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        await self._do("read_into", path, lambda: self.inner.read_into(path, buffer, start))

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._do("list", prefix, lambda: self.inner.list(prefix))

    async def find(self, path: str) -> ObjectInfo | None:
        return await self._do("find", path, lambda: self.inner.find(path))

    async def delete(self, path: str) -> None:
        await self._do("delete", path, lambda: self.inner.delete(path))

    async def close(self) -> None:
        await self.inner.close()

    async def _do(self, verb: str, path: str, act: Callable[[], Awaitable[Result]]) -> Result:
        self.asked.append((verb, path))
        for plan in self._plans:
            if plan.times > 0 and verb in plan.verbs and path.startswith(plan.prefix):
                plan.times -= 1
                result: Result = await plan.what(act)
                return result
        return await act()


def in_memory() -> Troubled:
    """A new, empty bucket in memory."""
    return Troubled(open_bucket(f"memory://test-{uuid4().hex}/run"))


# --- time --------------------------------------------------------------------------------------------------------


class _QuickSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else timeout / SPEED)


class _QuickLoop(asyncio.SelectorEventLoop):
    """One second of its time takes a millisecond."""

    def __init__(self) -> None:
        super().__init__(_QuickSelector())

    def time(self) -> float:
        return super().time() * SPEED


class Quick(Runtime):
    """The runtime of a quick loop."""

    def clock(self) -> float:
        return time.monotonic() * SPEED


def quickly(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in a quick loop."""
    with asyncio.Runner(loop_factory=_QuickLoop) as runner:
        return runner.run(work)
