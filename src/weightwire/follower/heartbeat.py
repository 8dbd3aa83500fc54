"""What a follower tells everybody about itself: how far it is, what it took, what its engines serve, what is wrong."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress

from weightwire.bucket import Bucket
from weightwire.chain import ChainReader, Heartbeat, PassedVersion, StageTiming, heartbeat_path, seal
from weightwire.errors import BucketError, PermissionDenied, RunError, UnsupportedFormat
from weightwire.follower.standing import Standing
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener

__all__ = ["HeartbeatWriter"]

_LEASE = 60.0  # a follower that has not been heard of for so long holds back nothing
_RECENT = 100  # versions that a heartbeat tells of
_MOST_TROUBLE = 500  # characters


class HeartbeatWriter:
    """Writes a follower's heartbeat: `beat`, and again whenever `wait` returns.

    Without the right to write, it follows all the same.
    """

    def __init__(self, bucket: Bucket, runtime: Runtime, name: str, emit: Listener) -> None:
        self._bucket = bucket
        self._runtime = runtime
        self._name = name
        self._emit = emit
        self._timings = _StageTimings()
        self._recalled = False
        self._served: int | None = None
        self._engines_trouble = ""
        self._unsaid = asyncio.Event()  # there is something for a heartbeat to say
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
            self.hurry()

    def hurry(self) -> None:
        """The next heartbeat is due now."""
        self._unsaid.set()

    async def wait(self) -> None:
        """Until the next heartbeat is due."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._unsaid.wait(), _LEASE / 4)

    async def beat(self, standing: Standing, trouble: str) -> None:
        """Tells how far this follower is, if it is known in which run."""
        self._unsaid.clear()
        chain = standing.chain
        if chain is None:
            return
        if not self._recalled and standing.head >= 0:
            await self._recall(chain, standing.head)
        beat = Heartbeat(
            run=chain.run.run,
            name=self._name,
            version=standing.version if standing.version is not None else -1,
            head=standing.head,
            lease=_LEASE,
            time=self._runtime.time(),
            host=platform.node(),
            trouble="; ".join(filter(None, (trouble, self._engines_trouble)))[:_MOST_TROUBLE],
            stages=self._timings.latest,
            served=self._served,
            recent=self._timings.recent,
        )
        await self._write(beat)

    async def _write(self, beat: Heartbeat) -> None:
        try:
            await self._bucket.put(heartbeat_path(self._name), seal(beat).data)
            self._allowed = True
        except PermissionDenied:
            if self._allowed:  # said once, and tried again: a key that has expired may come back
                self._emit(Event("warning", message="this key may not write, so nobody sees how far this follower is"))
            self._allowed = False
        except BucketError:
            pass  # the next one may get through

    async def _recall(self, chain: ChainReader, head: int) -> None:
        """What it said before it was restarted, so that the story of this replica goes on."""
        path = heartbeat_path(self._name)
        with suppress(BucketError, RunError, UnsupportedFormat):
            said = chain.unseal(await self._bucket.get(path), Heartbeat, path).record
            # None that is ahead of the run: it is none of ours, and would push out what is.
            self._timings.recall(one for one in said.recent if 0 <= one.version <= head)
        self._recalled = True


class _StageTimings:
    """How long the stages took: the latest of each, and those of the newest versions."""

    def __init__(self) -> None:
        self.latest: dict[str, StageTiming] = {}
        self._by_version: dict[int, dict[str, StageTiming]] = {}

    @property
    def recent(self) -> tuple[PassedVersion, ...]:
        return tuple(PassedVersion(version, stages) for version, stages in sorted(self._by_version.items()))

    def add(self, version: int | None, stages: Mapping[str, StageTiming]) -> None:
        self.latest.update(stages)
        if version is not None and stages:
            self._by_version.setdefault(version, {}).update(stages)
            self._forget_the_oldest()

    def recall(self, before: Iterable[PassedVersion]) -> None:
        """What was known before a restart; what has been added since counts for more."""
        self._by_version = {one.version: dict(one.stages) for one in before} | self._by_version
        self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        while len(self._by_version) > _RECENT:
            del self._by_version[min(self._by_version)]
