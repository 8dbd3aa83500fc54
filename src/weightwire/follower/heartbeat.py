"""What a follower tells everybody about itself: how far it is, what it took, what its engines serve, what is wrong."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from contextlib import suppress

from weightwire.bucket import Bucket
from weightwire.chain import ChainReader, Heartbeat, PassedVersion, Run, StageTiming, heartbeat_path, seal
from weightwire.errors import BucketError, PermissionDenied, RunError, UnsupportedFormat
from weightwire.follower.standing import Standing
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener

__all__ = ["HeartbeatWriter"]

_LEASE = 60.0  # a follower that has not been heard of for so long holds back nothing
_RECENT = 100  # versions that a heartbeat tells of
_MOST_TROUBLE = 500  # characters


class HeartbeatWriter:
    """Writes a follower's heartbeat: `beat`, and again whenever `wait` returns; `stop` writes the last one.

    Without the right to write, the follower follows all the same.
    """

    def __init__(self, bucket: Bucket, runtime: Runtime, name: str, emit: Listener) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._name = name
        self._emit = emit
        self._timings = _StageTimings()
        self._served: int | None = None
        self._engines_trouble = ""
        self._said: tuple[str, int | None, str] | None = None  # run, version and trouble of the last one
        self._due = asyncio.Event()  # there is something new to say
        self._writing = asyncio.Lock()  # one after the other: the last one must be the last
        self._allowed = True

    def record(self, stage: str, version: int, timing: StageTiming) -> None:
        """A stage of a version has ended: for the next heartbeat."""
        self._timings.add(version, {stage: timing})

    def serve(self, version: int | None, trouble: str, stages: Mapping[str, StageTiming]) -> None:
        """What the engines serve that are kept up to date from here: for the next heartbeat."""
        self._timings.add(version, stages)
        served = -1 if version is None else version
        if (served, trouble) != (self._served, self._engines_trouble):
            self._served, self._engines_trouble = served, trouble
            self._due.set()

    def notice(self, standing: Standing, trouble: str) -> None:
        """A heartbeat is due now if any of this is news, not when the next one would be."""
        if standing.run is not None and (standing.run.run, standing.version, trouble) != self._said:
            self._due.set()

    async def wait(self) -> None:
        """Until the next heartbeat is due."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), _LEASE / 4)

    async def beat(self, standing: Standing, trouble: str) -> None:
        """Tells how far this follower is, once it is known in which run."""
        self._due.clear()
        async with self._writing:
            if standing.run is not None:
                # Said, also if it fails: the next one may get through, in its own time.
                self._said = standing.run.run, standing.version, trouble
                both = "; ".join(filter(None, (trouble, self._engines_trouble)))
                await self._write(standing.run, standing, both, _LEASE)

    async def stop(self, standing: Standing) -> None:
        """The last one, which ends the lease. Whoever has stopped needs nothing, and nothing is wrong with it."""
        async with self._writing:
            if standing.run is not None and self._said is not None:
                await self._write(standing.run, standing, "", lease=0.0)

    async def _write(self, run: Run, standing: Standing, trouble: str, lease: float) -> None:
        if self._timings.before is None:
            self._timings.before = await self._read_before(run)
        beat = Heartbeat(
            run=run.run,
            name=self._name,
            version=standing.version if standing.version is not None else -1,
            head=standing.head,
            lease=lease,
            time=self._runtime.time(),
            host=platform.node(),
            trouble=trouble[:_MOST_TROUBLE],
            stages=self._timings.latest,
            served=self._served,
            recent=self._timings.recent(standing.head),
        )
        try:
            await self._bucket.put(heartbeat_path(self._name), seal(beat).data)
            self._allowed = True
        except PermissionDenied:
            if self._allowed:  # said once, and tried again: a key that has expired may come back
                self._emit(Event("warning", message="this key may not write, so nobody sees how far this follower is"))
            self._allowed = False
        except BucketError:
            pass  # the next one may get through

    async def _read_before(self, run: Run) -> tuple[PassedVersion, ...]:
        """What it said before it was restarted, so that the story of this replica goes on."""
        path = heartbeat_path(self._name)
        with suppress(BucketError, RunError, UnsupportedFormat):
            return ChainReader(self._bucket, run).unseal(await self._bucket.get(path), Heartbeat, path).record.recent
        return ()


class _StageTimings:
    """How long the stages took: the latest of each, and those of the newest versions."""

    def __init__(self) -> None:
        self.latest: dict[str, StageTiming] = {}
        self.before: tuple[PassedVersion, ...] | None = None  # what was said before a restart, once it is known
        self._by_version: dict[int, dict[str, StageTiming]] = {}

    def add(self, version: int | None, stages: Mapping[str, StageTiming]) -> None:
        self.latest.update(stages)
        if version is not None and stages:
            self._by_version.setdefault(version, {}).update(stages)
            while len(self._by_version) > _RECENT:
                del self._by_version[min(self._by_version)]

    def recent(self, head: int) -> tuple[PassedVersion, ...]:
        """The newest versions, the oldest first."""
        # None that is ahead of the run: somebody else wrote it, and it would push out what is ours.
        known = {
            one.version: one.stages
            for one in self.before or ()
            if one.version >= 0 and (head < 0 or one.version <= head)
        }
        newest = sorted({**known, **self._by_version}.items())[-_RECENT:]
        return tuple(PassedVersion(version, stages) for version, stages in newest)
