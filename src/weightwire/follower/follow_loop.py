"""The follower's work, as coroutines: finds new versions, updates the replica, hands out updates, writes heartbeats.

Works over an injected bucket, runtime and replica; `follower` is its synchronous face. Never imports the publisher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from weightwire.catchup import Fetcher
from weightwire.chain import Commit, Sealed, StageTiming
from weightwire.errors import WeightwireError
from weightwire.follower.discovery import Discovery
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.heartbeat import HeartbeatWriter
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.polling import Polling
from weightwire.follower.replica_updater import ReplicaUpdater
from weightwire.follower.run_position import RunPosition
from weightwire.follower.update import Update
from weightwire.telemetry import Event

__all__ = ["FollowLoop"]


class FollowLoop:
    """One follower's work: `run` until it is cancelled, or one `look` after the other."""

    def __init__(self, context: FollowContext, name: str) -> None:
        bucket, runtime = context.bucket, context.runtime
        self.replica = context.replica
        self.trouble = ""
        self._context = context
        self._looking = asyncio.Lock()
        self._polling = Polling(bucket, runtime)
        self._heartbeat = HeartbeatWriter(context, name)
        self._patches = PatchQueue(self.replica, runtime)
        self._position = RunPosition(context)
        fetcher = Fetcher(bucket, runtime, self.replica.directory, context.stage)
        self._updater = ReplicaUpdater(context, fetcher, self._position, self._patches, self._reach)
        self._discovery = Discovery(context, fetcher, self._position, self._patches, self._updater)

    @property
    def commit(self) -> Sealed[Commit] | None:
        """Of the version that the replica holds, once that is known to be one of the run."""
        return self._position.commit

    @property
    def version(self) -> int | None:
        return self._position.version

    @property
    def head(self) -> int:
        """The newest version that has been seen; -1 if none has."""
        return self._position.head

    # --- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows until it is cancelled. Whatever goes wrong is told, once, and tried again."""
        beating = asyncio.create_task(self._beat_forever())
        failures = 0
        try:
            while True:
                failures = 0 if await self._look_once() else failures + 1
                self._heartbeat.notice(self._position, self.trouble)
                await self._polling.sleep(failures)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _look_once(self) -> bool:
        """Returns whether all went well."""
        try:
            await self.look()
        except WeightwireError as problem:
            self._note(problem)
            return False
        except MemoryError:
            self._note(WeightwireError("out of memory"))
            return False
        except Exception as problem:
            self.trouble = f"the follower failed ({type(problem).__name__}: {problem})"
            raise
        self._recover()
        return True

    def _note(self, problem: WeightwireError) -> None:
        if problem.message != self.trouble:
            self._context.warn(str(problem), self.version)
        self.trouble = problem.message

    def _recover(self) -> None:
        if self.trouble:
            now = self._context.runtime.time()
            self._context.emit(Event("recovered", self.version, at=now, message=f"over: {self.trouble}"))
        self.trouble = ""

    def wake(self) -> None:
        """Someone says that there is something new."""
        self._polling.wake()

    async def look(self) -> bool:
        """Discovers what is new and applies all of it. Returns whether there was anything."""
        async with self._looking:
            return await self._discovery.look()

    def _reach(self, commit: Sealed[Commit], nbytes: int, seconds: float) -> None:
        self._context.stage("apply", commit.record.version, nbytes, seconds)
        self._polling.observe(commit.record)
        self._heartbeat.notice(self._position, self.trouble)
        self._patches.announce()

    # --- for engines ---------------------------------------------------------------------------------------------

    async def take(self) -> Update | None:
        """What is new since the update taken last; None if nothing is."""
        async with self._updater.using:
            if self.commit is None or self.replica.position is None:
                return None
            return await self._patches.take(self.commit)

    async def wait_for_more(self, timeout: float) -> None:
        """Until there is something to take, or some time has gone by."""
        await self._patches.wait(self.commit if self.replica.position is not None else None, timeout)

    async def checkpoint(self) -> Path:
        """Makes `current` the version that is held; returns where it is. It stays there until the next call.

        Whoever was told to load all weights has them from here: the next patch starts where this is.
        """
        async with self._updater.using:
            path = await self._context.runtime.run_in_thread(self.replica.checkpoint)
            self._patches.load(self.commit)
            return path

    async def lend_checkpoint(self) -> Path:
        """As `checkpoint`; it stays until it is given back, whatever is handed out meanwhile."""
        async with self._updater.using:
            path = await self._context.runtime.run_in_thread(self.replica.lend)
            self._patches.load(self.commit)
            return path

    async def give_back(self, path: Path) -> None:
        async with self._updater.using:
            await self._context.runtime.run_in_thread(self.replica.give_back, path)

    async def make_current(self) -> None:
        """Makes `current` the version that is held, for nobody in particular."""
        async with self._updater.using:
            await self._context.runtime.run_in_thread(self.replica.make_current)

    def report_served(self, version: int | None, trouble: str, stages: Mapping[str, StageTiming]) -> None:
        """What the engines serve that are kept up to date from here: for the next heartbeat."""
        self._heartbeat.report_served(version, trouble, stages)

    # --- heartbeats ----------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            await self.beat()
            await self._heartbeat.wait()

    async def beat(self) -> None:
        """Tells how far this follower is."""
        await self._heartbeat.beat(self._position, self.trouble)

    async def stop_beating(self) -> None:
        """Tells that this follower has stopped: the lease ends, and nothing is kept for it any more."""
        await self._heartbeat.stop(self._position)
