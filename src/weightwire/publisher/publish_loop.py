"""The publisher's work, as coroutines: takes captures, makes versions of them, and says what became of each.

Works over an injected bucket and runtime; `publisher` is its synchronous face. How a version is made is up to the
process: the only one, or one rank of many.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weightwire.bucket import ObjectInfo, each
from weightwire.chain import ChainReader, Folder, Heartbeat, StageTiming
from weightwire.errors import BucketError, Fenced, Interrupted, RankFailed, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import PublishProcess, Taken
from weightwire.telemetry import Event
from weightwire.weights import Weights, nbytes_of

__all__ = ["PublishLoop"]

_AT_ONCE = 16  # heartbeats that are read at the same time


class PublishLoop:
    """One publisher's work. It makes one version at a time."""

    def __init__(self, context: PublishContext, process: PublishProcess) -> None:
        self.context = context
        self.process = process
        self._alone = asyncio.Lock()

    def wake(self) -> None:
        """There is a capture."""
        self.context.lifecycle.wake()

    def capture(self, publication: Publication, weights: Weights) -> None:
        """Copies weights that the trainer goes on to change. Called in the trainer's thread; then `wake`."""
        runtime = self.context.runtime
        began = runtime.clock()
        self.process.capture(publication, weights)
        seconds, nbytes = runtime.clock() - began, nbytes_of(weights)
        publication.stages = {"capture": StageTiming.of(seconds, nbytes, runtime.time())}
        self.context.emit(Event("capture", None, nbytes, seconds, runtime.time()))

    async def run(self) -> None:
        """Publishes captures as they come, until it is closed and there are none left."""
        try:
            while (taken := await self.process.take()) is not None:
                await self._publish(taken)
        except Exception as problem:
            self.context.lifecycle.fail(_bug(problem))
            self.abandon()
            raise
        finally:
            self.process.leave()

    async def publish_now(self, publication: Publication, weights: Weights) -> None:
        """The same for weights that need not be captured, since whoever has them waits.

        One after the other: one that was interrupted may still be under way.
        """
        async with self._alone:
            taken = await self.process.offer(publication, weights)
            if taken is not None:
                await self._publish(taken)

    async def _publish(self, taken: Taken) -> None:
        """One version, or the reason why not; the publication says which."""
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
            # Perhaps its commit was sent, and will arrive: nothing else may ever be sent in its place.
            self._stop(Interrupted("the publisher was interrupted", hint="make a new one"), publication)
            raise
        except Exception as problem:
            # A bug, or no memory: what is held here may not be what was published, so nothing more may be.
            self._stop(_bug(problem), publication)
        else:
            publication.succeed(commit.record)
            taken.copies.release_all()
            await self.process.follow_up(commit)

    def _give_up(self, publication: Publication, problem: WeightwireError) -> None:
        if problem is not self.context.lifecycle.failure:  # which has been told, and there is no next one
            self.context.warn(f"step {publication.step}: not published ({problem.message}); the next one includes it")
        publication.fail(problem)

    def _stop(self, failure: WeightwireError, publication: Publication) -> None:
        self.context.lifecycle.fail(failure)
        publication.fail(failure)
        self.context.warn(failure.message)

    def abandon(self) -> None:
        """Fails what nobody will publish any more."""
        copies = self.process.copies
        left = copies.take() if copies is not None else None
        if left is not None:
            left.fail(self.context.lifecycle.ending)

    async def close(self) -> None:
        """Lets `run` end once everything is published, and waits for what goes on in the background."""
        self.context.lifecycle.close()
        await self.context.background.wait()

    # --- followers -----------------------------------------------------------------------------------------------

    async def wait_for_replicas(self, version: int, count: int) -> None:
        """Until so many followers have said that they hold a version, or a later one."""
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
            with suppress(WeightwireError):  # gone meanwhile, say: the next look will tell
                beat = await chain.read_heartbeat(one.path)
                if beat is not None:
                    found.append(beat)

        await each(await self.context.bucket.list(Folder.REPLICAS), _AT_ONCE, read)
        # One that claims to be ahead of everybody is none of ours.
        known = self.process.version or 0
        return [one for one in found if one.version <= known]


def _bug(problem: Exception) -> WeightwireError:
    failure = WeightwireError(f"the publisher failed ({type(problem).__name__}: {problem})")
    failure.__cause__ = problem
    return failure
