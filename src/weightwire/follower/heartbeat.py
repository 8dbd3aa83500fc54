"""A follower's heartbeat in the bucket: its version, stage timings, the version its engines serve, and its trouble."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress

from weightwire.chain import ChainReader, Heartbeat, Run, StageTiming, get_record, heartbeat_path, seal
from weightwire.errors import BucketError, PermissionDenied, RunError, UnsupportedFormat
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.name_watch import NameWatch
from weightwire.follower.run_position import RunPosition

__all__ = ["HeartbeatWriter"]

_LEASE = 60.0  # seconds after which a follower without heartbeats no longer holds back `gc`
_MOST_TROUBLE = 500  # characters


class HeartbeatWriter:
    """Call `beat`, and again whenever `wait` returns. `stop` writes the last heartbeat.

    A follower without write permission works, but has no heartbeat. Another running follower with this name is noticed
    by its heartbeat: then this one takes another name from `rename`, or only warns.
    """

    def __init__(self, context: FollowContext, name: str, rename: Callable[[], str] | None = None) -> None:
        self._context = context
        self._timings = context.timings
        self._name = name
        self._names = NameWatch(context, rename)
        self._served: int | None = None
        self._engines_trouble = ""
        self._last: tuple[str, int | None, str] | None = None  # run, version and trouble of the last heartbeat
        self._due = asyncio.Event()
        self._writing = asyncio.Lock()  # in order: nothing may follow the last heartbeat
        self._allowed = True

    def report_served(self, version: int | None, trouble: str, stages: Mapping[str, StageTiming]) -> None:
        """Passes the lowest version that this follower's engines serve to the next heartbeat."""
        self._timings.add(version, stages)
        served = -1 if version is None else version
        if (served, trouble) != (self._served, self._engines_trouble):
            self._served, self._engines_trouble = served, trouble
            self._due.set()

    def notice(self, position: RunPosition, trouble: str) -> None:
        """Makes a heartbeat due now if any of this has changed."""
        if position.run is not None and (position.run.run, position.version, trouble) != self._last:
            self._due.set()

    async def wait(self) -> None:
        """Waits until the next heartbeat is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEASE / 4):  # `wait_for` of Python 3.11 can swallow a cancellation
                await self._due.wait()

    async def beat(self, position: RunPosition, trouble: str) -> None:
        """Writes a heartbeat, once the run is known.

        After a restart, not before it is known whether the run has the replica's version: without a version, it would
        give up the lease that the last one still holds.
        """
        self._due.clear()
        async with self._writing:
            if position.run is not None and not position.is_sought:
                if self._names.is_due():
                    self._name = self._names.check(self._name, await self._get())
                # Also if writing fails: the next regular heartbeat is soon enough.
                self._last = position.run.run, position.version, trouble
                await self._write(position.run, position, self._all_trouble(trouble), _LEASE)

    async def stop(self, position: RunPosition, trouble: str) -> None:
        """Writes the last heartbeat, which ends the lease. It still reports the current trouble."""
        async with self._writing:
            if position.run is not None and self._last is not None:
                await self._write(position.run, position, self._all_trouble(trouble), lease=0.0)

    async def is_name_taken(self, run: Run) -> bool:
        """Whether another follower holds a lease under this name, before this one has written a heartbeat."""
        if self._last is not None:
            return False
        beat = await self._read(run)
        return beat is not None and self._context.runtime.time() < beat.time + beat.lifetime

    def _all_trouble(self, trouble: str) -> str:
        return "; ".join(filter(None, (trouble, self._engines_trouble)))

    async def _write(self, run: Run, position: RunPosition, trouble: str, lease: float) -> None:
        if self._timings.before is None:
            before = await self._read(run)
            self._timings.before = before.recent if before else ()
        beat = Heartbeat(
            run=run.run,
            name=self._name,
            version=position.version if position.version is not None else -1,
            head=position.head,
            lease=lease,
            time=self._context.runtime.time(),
            host=platform.node(),
            trouble=trouble[:_MOST_TROUBLE],
            stages=self._timings.latest,
            served=self._served,
            recent=self._timings.recent(position.head),
        )
        try:
            data = seal(beat).data
            self._names.remember(data)
            await self._context.bucket.put(heartbeat_path(self._name), data)
            self._allowed = True
        except PermissionDenied:
            if self._allowed:  # warn once, but keep trying: an expired key may be renewed
                self._context.warn("this key has no write permission, so this follower writes no heartbeats")
            self._allowed = False
        except BucketError:
            pass  # the next one may get through

    async def _read(self, run: Run) -> Heartbeat | None:
        """The heartbeat in the bucket. After a restart, its history goes into the next one."""
        data = await self._get()
        with suppress(RunError, UnsupportedFormat):
            chain = ChainReader(self._context.bucket, run)
            return None if data is None else chain.unseal(data, Heartbeat, heartbeat_path(self._name)).record
        return None

    async def _get(self) -> bytes | None:
        with suppress(BucketError, RunError):
            return await get_record(self._context.bucket, heartbeat_path(self._name))
        return None
