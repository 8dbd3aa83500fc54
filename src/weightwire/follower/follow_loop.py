"""The follower as coroutines: finds new versions, updates the replica, hands out updates and writes heartbeats.

The bucket, runtime and replica are injected. `follower` is the synchronous API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from weightwire.catchup import Fetcher
from weightwire.chain import Commit, Sealed, StageTiming
from weightwire.errors import NoRun, OutOfMemory, WeightwireError
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

_LONG_LOOK = 5.0  # seconds after which a look that has not ended counts as an outage


class FollowLoop:
    """Use `run` to follow until cancelled, or call `look` for each update."""

    def __init__(self, context: FollowContext, name: str, rename: Callable[[], str] | None = None) -> None:
        """`rename` returns another name, for when another follower uses this one."""
        bucket, runtime = context.bucket, context.runtime
        self.replica = context.replica
        self.trouble = ""
        self._context = context
        self._looking = asyncio.Lock()
        self._look_began: float | None = None  # of the current look
        self._last_look = runtime.clock()  # when the last look succeeded
        self._polling = Polling(bucket, runtime)
        self._heartbeat = HeartbeatWriter(context, name, rename)
        self._patches = PatchQueue(self.replica, runtime)
        self._position = RunPosition(context)
        bucket.note = self._position.describe_lag
        fetcher = Fetcher(bucket, runtime, self.replica.directory, context.stage)
        self._updater = ReplicaUpdater(context, fetcher, self._position, self._patches, self._reach)
        self._discovery = Discovery(context, fetcher, self._position, self._patches, self._updater)

    @property
    def commit(self) -> Sealed[Commit] | None:
        """The commit of the version held, once it is known to belong to the run."""
        return self._position.commit

    @property
    def version(self) -> int | None:
        return self._position.version

    @property
    def head(self) -> int:
        """The newest version seen, or -1."""
        return self._position.head

    @property
    def outage(self) -> float:
        """Seconds since the last look that succeeded, if looks fail or the current one hangs. Otherwise 0."""
        now, began = self._context.runtime.clock(), self._look_began
        is_slow = began is not None and now - began > _LONG_LOOK
        return now - self._last_look if self.trouble or is_slow else 0.0

    # --- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows until it is cancelled. Reports each error once, and tries again."""
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
            await self._updater.stop()

    async def _look_once(self) -> bool:
        """Returns whether it succeeded."""
        try:
            await self.look(retries_later=True)
        except NoRun as problem:
            self._note(problem.reworded(f"{problem.message}; waiting for a run", hint=problem.hint))
            return False
        except WeightwireError as problem:
            self._note(problem)
            return False
        except MemoryError:
            self._note(OutOfMemory("out of memory"))
            return False
        except Exception as problem:
            self.trouble = f"the follower failed ({type(problem).__name__}: {problem})"
            raise
        self._recover()
        return True

    def _note(self, problem: WeightwireError) -> None:
        if problem.message != self.trouble:
            lag = self._position.describe_lag()
            text = f"{problem.message} ({lag})" if lag else problem.message
            self._context.warn(str(problem.reworded(text, hint=problem.hint)), self.version)
        self.trouble = problem.message

    def _recover(self) -> None:
        if self.trouble:
            now = self._context.runtime.time()
            self._context.emit(Event("recovered", self.version, at=now, message=f"recovered: {self.trouble}"))
        self.trouble = ""

    def wake(self, commit: bytes = b"") -> None:
        """Looks for new versions now. `commit` is the newest one as stored, if it was pushed."""
        self._discovery.pushed.add(commit)
        self._polling.wake()

    async def look(self, *, retries_later: bool = False) -> bool:
        """Discovers new versions and applies them. Returns whether there were any. See `Discovery.look`."""
        async with self._looking:
            self._look_began = self._context.runtime.clock()
            self._polling.begin_look()
            try:
                moved = await self._discovery.look(retries_later=retries_later)
            finally:
                self._look_began = None
            self._last_look = self._context.runtime.clock()
            return moved

    def _reach(self, commit: Sealed[Commit], nbytes: int, seconds: float) -> None:
        self._context.stage("apply", commit.record.version, nbytes, seconds)
        self._polling.observe(commit.record)
        self._heartbeat.notice(self._position, self.trouble)
        self._patches.announce()

    # --- for engines ---------------------------------------------------------------------------------------------

    async def take(self) -> Update | None:
        """The changes since the last update taken, or None."""
        async with self._updater.using:
            if self.commit is None or self.replica.position is None:
                return None
            return await self._patches.take(self.commit)

    async def wait_for_more(self, timeout: float) -> None:
        """Waits until there is an update to take, or for `timeout` seconds."""
        await self._patches.wait(self.commit if self.replica.position is not None else None, timeout)

    async def checkpoint(self) -> Path:
        """Makes `current` the version held and returns its directory, which stays until the next call.

        After an update without a patch, the next patch starts at this version.
        """
        async with self._updater.using:
            path = await self._context.runtime.run_in_thread(self.replica.checkpoint)
            self._patches.load(self.commit)
            return path

    async def lend_checkpoint(self) -> Path:
        """Like `checkpoint`, but the directory stays until `give_back`."""
        async with self._updater.using:
            path = await self._context.runtime.run_in_thread(self.replica.lend)
            self._patches.load(self.commit)
            return path

    async def give_back(self, path: Path) -> None:
        async with self._updater.using:
            await self._context.runtime.run_in_thread(self.replica.give_back, path)

    async def make_current(self) -> None:
        """Makes `current` the version held."""
        async with self._updater.using:
            await self._context.runtime.run_in_thread(self.replica.make_current)

    def report_served(self, version: int | None, trouble: str, stages: Mapping[str, StageTiming]) -> None:
        """Passes the lowest version that this follower's engines serve to the next heartbeat."""
        self._heartbeat.report_served(version, trouble, stages)

    # --- heartbeats ----------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            await self.beat()
            await self._heartbeat.wait()

    async def beat(self) -> None:
        """Writes a heartbeat."""
        await self._heartbeat.beat(self._position, self.trouble)

    async def beat_unless_name_is_taken(self) -> None:
        """Writes a heartbeat, unless a running follower uses the same name: our last heartbeat would end its lease."""
        run = self._position.run
        if run is not None and await self._heartbeat.is_name_taken(run):
            self._context.warn("a running follower uses the same name, so this one writes no heartbeat")
        else:
            await self.beat()

    async def stop_beating(self) -> None:
        """Writes the last heartbeat. The lease ends, so nothing is kept for this follower any more."""
        await self._heartbeat.stop(self._position, self.trouble)
