"""The publisher's work as coroutines: takes captures, makes versions of them, and reports each outcome.

`publisher` is its synchronous interface. The process (a single one, or a rank of many) knows how to make a version.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weightwire import codec
from weightwire.bucket import ObjectInfo, each
from weightwire.chain import ChainReader, ChainWriter, Commit, Folder, Heartbeat, Sealed, StageTiming
from weightwire.errors import BucketError, Fenced, RankFailed, SchemaChanged, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import PublishProcess, Taken, interrupted
from weightwire.publisher.resumption import Resumption
from weightwire.telemetry import Event
from weightwire.weights import Weights, nbytes_of

__all__ = ["PublishLoop"]

_AT_ONCE = 16  # concurrent reads of heartbeats
_ALIVE = 15.0  # seconds between signs of life


class PublishLoop:
    """Makes one version at a time."""

    def __init__(self, context: PublishContext, process: PublishProcess) -> None:
        self.context = context
        self.process = process
        self._alone = asyncio.Lock()
        self._has_committed = False

    def wake(self) -> None:
        """Call this after a capture."""
        self.context.lifecycle.wake()

    def capture(self, publication: Publication, weights: Weights) -> None:
        """Copies weights that the trainer will change. Call it in the trainer's thread, then call `wake`."""
        runtime = self.context.runtime
        began = runtime.clock()
        self.process.capture(publication, weights)
        self.context.backlog.add(publication)
        seconds, nbytes = runtime.clock() - began, nbytes_of(weights)
        publication.stages = {"capture": StageTiming.of(seconds, nbytes, runtime.time())}
        self.context.emit(Event("capture", None, nbytes, seconds, runtime.time()))

    async def run(self) -> None:
        """Publishes captures until it is closed and none is left."""
        showing = asyncio.create_task(self._stay_alive())
        try:
            while (taken := await self.process.take()) is not None:
                await self._publish(taken)
        except Exception as problem:
            self.context.lifecycle.fail(_bug(problem))
            self.abandon()
            raise
        finally:
            showing.cancel()
            self.process.leave()

    async def _stay_alive(self) -> None:
        """Writes signs of life while there is nothing to publish: followers can then tell a frozen bucket."""
        while self.context.settings.signer is not None and self.context.lifecycle.failure is None:
            self._show_alive()
            await asyncio.sleep(_ALIVE)

    def _show_alive(self) -> None:
        """Writes a sign of life in the background, if this publisher signs."""
        writer, background = self.process.writer, self.context.background
        if writer is not None and self.context.settings.signer is not None and not background.is_running("alive"):
            background.start(_write_signs(writer), "alive")

    async def publish_now(self, publication: Publication, weights: Weights) -> None:
        """Publishes weights without a capture, because the caller waits.

        The lock is needed because an interrupted call may still be running.
        """
        async with self._alone:
            self.context.backlog.add(publication)
            taken = await self.process.offer(publication, weights)
            if taken is not None:
                await self._publish(taken)

    async def _publish(self, taken: Taken) -> None:
        """Makes one version. The publication gets the commit or the error."""
        problem = self.context.lifecycle.failure or taken.problem
        try:
            if problem is not None:
                self._give_up(taken.publication, problem)
            else:
                await self._try_to_publish(taken)
        finally:
            taken.end(self.context.lifecycle.failure)

    async def _try_to_publish(self, taken: Taken) -> None:
        publication = taken.publication
        try:
            commit = await self.process.make_version(taken)
        except (Fenced, RankFailed) as problem:
            self._stop(problem, publication)
        except WeightwireError as problem:
            self._give_up(publication, problem)
        except asyncio.CancelledError:
            # The commit may have been sent and may still arrive: nothing else may be sent in its place.
            self._stop(self.context.lifecycle.failure or interrupted(), publication)
            raise
        except Exception as problem:
            # A bug, or out of memory: the copies may differ from what was published, so publish nothing more.
            self._stop(_bug(problem), publication)
        else:
            await self._report_resumption(commit)
            publication.succeed(commit.record)
            self.context.backlog.commit()
            self._show_alive()
            taken.copies.release_all()
            codec.trim()  # an anchor may follow, or nothing for a while
            await self.process.follow_up(commit)

    async def _report_resumption(self, commit: Sealed[Commit]) -> None:
        """After the first commit: warns if its weights do not continue those of the run."""
        writer, first_time = self.process.writer, not self._has_committed
        self._has_committed = True
        if writer is None or not first_time:  # only rank 0 has a writer
            return
        context = self.context
        try:
            newest = await writer.chain.read_weights_before(commit)
        except WeightwireError:
            return  # the version is committed: a report is not worth a failure
        if newest is None:
            return
        resumed = Resumption(
            context.bucket.url, newest.record, commit.record, writer.run.parameters, context.settings.resumes
        )
        if resumed.is_suspicious:
            context.warn(resumed.warning)
        else:
            context.emit(Event("resumed", commit.record.version, at=context.runtime.time(), message=resumed.note))

    def _give_up(self, publication: Publication, problem: WeightwireError) -> None:
        if problem is not self.context.lifecycle.failure:  # the failure has already been reported
            self.context.warn(f"{publication.name}: not published ({problem.message}){_outlook(problem)}")
        publication.fail(problem)

    def _stop(self, failure: WeightwireError, publication: Publication) -> None:
        self.context.lifecycle.fail(failure)
        publication.fail(failure)
        self.context.warn(failure.message)

    def abandon(self) -> None:
        """Fails a pending capture that will not be published any more."""
        copies = self.process.copies
        left = copies.take() if copies is not None else None
        if left is not None:
            left.fail(self.context.lifecycle.ending)

    async def close(self) -> None:
        """Lets `run` end once everything is published, and waits for background tasks."""
        self.context.lifecycle.close()
        await self.context.background.wait()

    # --- followers -----------------------------------------------------------------------------------------------

    async def wait_for_replicas(self, version: int, count: int) -> None:
        """Waits until `count` followers report a version, or a later one."""
        while True:
            try:
                reached = [one for one in await self._heartbeats() if one.reached >= version]
            except BucketError as problem:
                self.context.warn(f"{problem.message}; trying again")
                reached = []
            if len(reached) >= count:
                return
            await asyncio.sleep(0.2 + 0.1 * self.context.runtime.random.random())

    async def _heartbeats(self) -> list[Heartbeat]:
        run = self.process.run_record
        if run is None:
            return []
        chain = ChainReader(self.context.bucket, run)
        found: list[Heartbeat] = []

        async def read(one: ObjectInfo) -> None:
            with suppress(WeightwireError):  # deleted meanwhile, for example
                beat = await chain.read_heartbeat(one.path)
                if beat is not None:
                    found.append(beat)

        await each(await self.context.bucket.list(Folder.REPLICAS), _AT_ONCE, read)
        # A heartbeat ahead of this publisher belongs to another run.
        known = self.process.version or 0
        return [one for one in found if one.version <= known]


async def _write_signs(writer: ChainWriter) -> None:
    """Writes signs of life until no version was committed meanwhile: the last one must name the newest version."""
    shown = None
    while writer.head is not shown:
        shown = writer.head
        await writer.show_alive()


def _outlook(problem: WeightwireError) -> str:
    """Weights that do not fit the run are refused every time. After any other error, the next version includes the
    changes."""
    return "" if isinstance(problem, SchemaChanged) else "; the next version includes it"


def _bug(problem: Exception) -> WeightwireError:
    failure = WeightwireError(
        f"the publisher failed ({type(problem).__name__}: {problem})",
        hint="this is a bug: restart the trainer, and report the traceback",
    )
    failure.__cause__ = problem
    return failure
