"""A bucket that reports silence: one warning when the store does not answer, one event when it answers again.

Publishers, followers and commands all send their requests through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from weightwire.bucket.bucket import GET_LIMIT, Bucket, ObjectInfo
from weightwire.errors import AlreadyExists, BucketError, Unavailable
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener, warning

__all__ = ["MonitoredBucket"]

_SECONDS = 5.0
_SLOWEST = 4 << 20  # bytes per second: a transfer at this rate is slow, not silent
_IN_FLIGHT = 64 << 20  # bytes that a backend may have read from `data` and not sent yet
_RESOLUTION = 0.001  # seconds; timers and clocks differ by less


@dataclass(eq=False)
class _Request:
    """`since` is the last sign of life, None while the caller computes the data to send."""

    since: float | None
    patience: float
    timer: asyncio.TimerHandle | None = None


class MonitoredBucket:
    """Passes every request on to `inner`, and reports once when no answer comes for 5 s.

    Large transfers get more time, in proportion to their size. `note` adds what waits for the store, such as
    "2 versions behind".
    """

    def __init__(self, inner: Bucket, runtime: Runtime, emit: Listener, note: Callable[[], str] = str) -> None:
        self.url, self.strict, self.poll_interval = inner.url, inner.strict, inner.poll_interval
        self.note = note
        self._inner = inner
        self._runtime = runtime
        self._emit = emit
        self._overdue: set[_Request] = set()
        self._silent_since: float | None = None
        self._failing_since: float | None = None  # writes
        self.problem: BucketError | None = None  # of the last write that failed

    @property
    def trouble_seconds(self) -> float:
        """How long writes have failed, or the store has been silent. 0 if it works, or nothing was tried."""
        since = [one for one in (self._failing_since, self._silent_since) if one is not None]
        return self._runtime.clock() - min(since) if since else 0.0

    async def create(self, path: str, data: bytes) -> None:
        with self._request(len(data)), self._writing():
            await self._inner.create(path, data)

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        nbytes = len(data) if isinstance(data, bytes) else size or _IN_FLIGHT
        with self._request(min(nbytes, _IN_FLIGHT)) as request, self._writing():
            sent = data if isinstance(data, bytes) else self._pieces(data, request)
            await self._inner.put(path, sent, size)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        with self._request():
            return await self._inner.get(path, limit)

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        with self._request(buffer.nbytes):
            await self._inner.read_into(path, buffer, start)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        with self._request():
            return await self._inner.list(prefix)

    async def find(self, path: str) -> ObjectInfo | None:
        with self._request():
            return await self._inner.find(path)

    async def delete(self, path: str) -> None:
        with self._request():
            await self._inner.delete(path)

    async def close(self) -> None:
        await self._inner.close()

    def _pieces(self, data: Iterable[bytes | memoryview], request: _Request) -> Iterator[bytes | memoryview]:
        """Each piece that the backend asks for shows that the one before was sent."""
        pieces = iter(data)
        while True:
            request.since = None
            piece = next(pieces, None)
            request.since = self._runtime.clock()
            if piece is None:
                return
            yield piece

    @contextmanager
    def _request(self, nbytes: int = 0) -> Iterator[_Request]:
        request = _Request(self._runtime.clock(), _SECONDS + nbytes / _SLOWEST)
        self._check_after(request, request.patience)
        try:
            yield request
        except BucketError as problem:
            self._end(request, answered=not isinstance(problem, Unavailable))
            raise
        except BaseException:
            self._end(request, answered=False)
            raise
        else:
            self._end(request, answered=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except AlreadyExists:
            raise  # an answer, not a failure
        except BucketError as problem:
            self.problem = problem
            if self._failing_since is None:
                self._failing_since = self._runtime.clock()
            raise
        self._failing_since = self.problem = None

    def _check_after(self, request: _Request, seconds: float) -> None:
        request.timer = asyncio.get_running_loop().call_later(seconds, self._check, request)

    def _check(self, request: _Request) -> None:
        now = self._runtime.clock()
        left = (now if request.since is None else request.since) + request.patience - now
        if left > _RESOLUTION:
            self._check_after(request, left)
            return
        self._overdue.add(request)
        if self._silent_since is None:
            self._silent_since = now - request.patience
            message = f"{self.url} has not answered for {request.patience:.0f} s{self._noted()}; still waiting"
            self._emit(warning(message, at=self._runtime.time()))

    def _end(self, request: _Request, *, answered: bool) -> None:
        if request.timer is not None:
            request.timer.cancel()
        self._overdue.discard(request)
        if answered and self._silent_since is not None and not self._overdue:
            seconds = self._runtime.clock() - self._silent_since
            self._silent_since = None
            message = f"{self.url} answers again after {seconds:.0f} s{self._noted()}"
            self._emit(Event("recovered", at=self._runtime.time(), message=message))

    def _noted(self) -> str:
        note = self.note()
        return f" ({note})" if note else ""
