"""What a follower tells everybody about itself: how far it is, what it took, what its engines serve, what is wrong."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from contextlib import suppress

from weightwire.chain import ChainReader, Heartbeat, PassedVersion, Run, StageTiming, heartbeat_path, seal
from weightwire.errors import BucketError, PermissionDenied, RunError, UnsupportedFormat
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.run_position import RunPosition

__all__ = ["HeartbeatWriter"]

_LEASE = 60.0  # a follower that has not been heard of for so long holds back nothing
_MOST_TROUBLE = 500  # characters


class HeartbeatWriter:
    """Writes a follower's heartbeat: `beat`, and again whenever `wait` returns; `stop` writes the last one.

    Without the right to write, the follower follows all the same.
    """

    def __init__(self, context: FollowContext, name: str) -> None:
        self._context = context
        self._timings = context.timings
        self._name = name
        self._served: int | None = None
        self._engines_trouble = ""
        self._said: tuple[str, int | None, str] | None = None  # run, version and trouble of the last one
        self._due = asyncio.Event()  # there is something new to say
        self._writing = asyncio.Lock()  # one after the other: the last one must be the last
        self._allowed = True

    def report_served(self, version: int | None, trouble: str, stages: Mapping[str, StageTiming]) -> None:
        """What the engines serve that are kept up to date from here: for the next heartbeat."""
        self._timings.add(version, stages)
        served = -1 if version is None else version
        if (served, trouble) != (self._served, self._engines_trouble):
            self._served, self._engines_trouble = served, trouble
            self._due.set()

    def notice(self, position: RunPosition, trouble: str) -> None:
        """A heartbeat is due now if any of this is news, not when the next one would be."""
        if position.run is not None and (position.run.run, position.version, trouble) != self._said:
            self._due.set()

    async def wait(self) -> None:
        """Until the next heartbeat is due."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), _LEASE / 4)

    async def beat(self, position: RunPosition, trouble: str) -> None:
        """Tells how far this follower is, once it is known in which run."""
        self._due.clear()
        async with self._writing:
            if position.run is not None:
                # Said, also if it fails: the next one may get through, in its own time.
                self._said = position.run.run, position.version, trouble
                both = "; ".join(filter(None, (trouble, self._engines_trouble)))
                await self._write(position.run, position, both, _LEASE)

    async def stop(self, position: RunPosition) -> None:
        """The last one, which ends the lease. Whoever has stopped needs nothing, and nothing is wrong with it."""
        async with self._writing:
            if position.run is not None and self._said is not None:
                await self._write(position.run, position, "", lease=0.0)

    async def _write(self, run: Run, position: RunPosition, trouble: str, lease: float) -> None:
        if self._timings.before is None:
            self._timings.before = await self._read_before(run)
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
            await self._context.bucket.put(heartbeat_path(self._name), seal(beat).data)
            self._allowed = True
        except PermissionDenied:
            if self._allowed:  # said once, and tried again: a key that has expired may come back
                self._context.warn("this key may not write, so nobody sees how far this follower is")
            self._allowed = False
        except BucketError:
            pass  # the next one may get through

    async def _read_before(self, run: Run) -> tuple[PassedVersion, ...]:
        """What it said before it was restarted, so that the story of this replica goes on."""
        path = heartbeat_path(self._name)
        with suppress(BucketError, RunError, UnsupportedFormat):
            data = await self._context.bucket.get(path)
            return ChainReader(self._context.bucket, run).unseal(data, Heartbeat, path).record.recent
        return ()
