"""6 publish, as coroutines: diff -> upload -> commit, anchors behind them, start and restart.

Works over an injected bucket and world; `publisher` is its synchronous face. Never imports the follower.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, TypeVar

from weightwire.bucket import Bucket
from weightwire.catchup import ChainPath, copy_weights
from weightwire.chain import (
    ANCHOR,
    DELTA,
    ChainWriter,
    Commit,
    DataFile,
    Heartbeat,
    Run,
    Sealed,
    Shortcut,
    StageTiming,
    seal,
    settle,
    shortcut_path,
    unseal,
)
from weightwire.delta import Delta, State, anchor
from weightwire.errors import BucketError, CheckpointError, Fenced, RankFailed, WeightwireError
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.last_published import advance_copy
from weightwire.publisher.publication import Publication
from weightwire.publisher.takeover import Opened, PublisherSettings, Takeover
from weightwire.publisher.upload import Dropped, Uploader
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener
from weightwire.weights import Dtype, Schema, Weights, schema_of_weights

__all__ = ["PublishLoop", "PublisherSettings", "finite"]

Result = TypeVar("Result")

Release = Callable[[str, int], None]
"""Hears of blocks of the captured weights that are no longer needed."""

_ANCHOR_SHARE = 0.66  # what an anchor takes of the raw weights, until one has been made


def _nothing(*args: object) -> None:
    pass


class PublishLoop:
    """One publisher's work. `attempt` makes one version; nothing else may run at the same time."""

    def __init__(self, bucket: Bucket, runtime: Runtime, settings: PublisherSettings, emit: Listener) -> None:
        self.bucket = bucket
        self.copies: HostCopies[Publication] | None = None
        self.state: State | None = None  # of what was published last, which `copies.published` holds
        self.writer: ChainWriter | None = None
        self.failure: WeightwireError | None = None
        self._runtime = runtime
        self._settings = settings
        self._emit = emit
        self._uploads = Uploader(bucket, runtime, settings.patience, self._is_newer_waiting, self._warn)
        self._opening = Takeover(bucket, runtime, settings, self._warn)
        self._aliases: Mapping[str, str] = {}
        self._wake = asyncio.Event()
        self._alone = asyncio.Lock()
        self._closing = False
        self._anchor_size = 0
        self._since_anchor = 0  # bytes of deltas
        self._versions_since_anchor = 0
        self._newest_anchor = ""
        self._behind: dict[asyncio.Task[None], None] = {}  # uploads and hints that go on behind the versions

    @property
    def run_record(self) -> Run | None:
        return self.writer.run if self.writer else None

    @property
    def version(self) -> int | None:
        """The newest, a fence included; None in a run that has not begun."""
        return self.writer.next_version - 1 if self.writer else None

    @property
    def dtypes(self) -> dict[str, Dtype]:
        """Of the run, if it has begun; else of what was captured first."""
        return {name: tensor.dtype for name, tensor in self.copies.published.items()} if self.copies else {}

    def _is_newer_waiting(self) -> bool:
        return self.copies is not None and self.copies.waiting

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes over the run, if there is one or a base to start one from; else the first publish starts it."""
        self._go_on(await self._opening.find())

    def _go_on(self, opened: Opened | None) -> None:
        if opened is None:
            return
        self.copies, self.state, self.writer = opened.copies, opened.state, opened.writer
        if opened.path is not None:
            self._count_from(opened.path)

    def _count_from(self, path: ChainPath) -> None:
        """How much there is since the newest anchor."""
        start, commits = path.start, path.commits
        if isinstance(start, Shortcut):
            self._newest_anchor = shortcut_path(seal(start))
        self._anchor_size = start.nbytes if start else 0
        self._since_anchor = sum(commit.record.nbytes for commit in commits)
        self._versions_since_anchor = sum(commit.record.kind == DELTA for commit in commits)

    # --- versions ------------------------------------------------------------------------------------------------

    def capture(self, publication: Publication, weights: Weights) -> None:
        """Copies weights that the trainer goes on to change. Called in the trainer's thread; then `wake`."""
        began = self._runtime.clock()
        if self.copies is None:
            self.copies = self._opening.allocate(schema_of_weights(weights))
        self._capture(self.copies, publication, weights)
        self._aliases = publication.aliases
        seconds, nbytes = self._runtime.clock() - began, sum(one.nbytes for one in weights.values())
        publication.stages = {"capture": StageTiming(round(seconds, 6), nbytes, self._runtime.time())}
        self._emit(Event("capture", None, nbytes, seconds, self._runtime.time()))

    def _capture(self, copies: HostCopies[Publication], publication: Publication, weights: Weights) -> None:
        copies.capture(weights, publication)

    def wake(self) -> None:
        """There is a capture."""
        self._wake.set()

    async def run(self) -> None:
        """Publishes captures as they come, until it is closed and there are none left."""
        try:
            await self._run()
        except Exception as problem:
            self.failure = WeightwireError(f"the publisher failed ({type(problem).__name__}: {problem})")
            self.failure.__cause__ = problem
            self.abandon()
            raise

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.copies is not None and self.copies.waiting:
                # Before anything is taken: while this waits for the bucket, captures must not wait for this.
                problem = await self._begin(schema_of_weights(self.copies.latest), self._aliases)
                if (taken := await self._runtime.run_in_thread(self.copies.take)) is None:
                    continue
                if problem is not None:
                    self._give_up(taken, problem)
                    self.copies.release_all()
                    continue
                await self.publish(taken, self.copies.latest, self.copies.release, self.copies.release_all)
            if self._closing and not self._wake.is_set():  # else something came just now
                return

    async def publish_now(self, publication: Publication, weights: Weights) -> None:
        """The same for weights that need not be captured, since whoever has them waits.

        One after the other: one that was interrupted may still be under way.
        """
        async with self._alone:
            problem = await self._begin(schema_of_weights(weights), publication.aliases)
            if problem is not None:
                self._give_up(publication, problem)
            else:
                await self.publish(publication, weights)

    async def _begin(self, schema: Schema, aliases: Mapping[str, str]) -> WeightwireError | None:
        """Starts the run, unless that has been done. Returns what keeps it from it."""
        if self.writer is not None or self.failure is not None:
            return self.failure
        try:
            self._go_on(await self._start_run(lambda: self._opening.begin(schema, aliases, self.copies)))
        except Dropped as dropped:
            return dropped.problem
        except WeightwireError as problem:
            return problem
        return None

    async def _start_run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        try:
            return await self._uploads.patiently(work, to_the_end=True)
        except (OSError, ValueError) as problem:  # of side files
            raise CheckpointError(f"the run cannot be started ({problem})", hint="check the side files") from problem

    def _give_up(self, publication: Publication, problem: WeightwireError) -> None:
        self._warn(f"step {publication.step}: not published ({problem.message}); the next one includes it")
        publication.fail(problem)

    async def publish(
        self,
        publication: Publication,
        weights: Weights,
        release: Release = _nothing,
        release_all: Callable[[], None] = _nothing,
    ) -> None:
        """One version, or the reason why not; the publication says which."""
        if self.failure is not None:
            release_all()
            publication.fail(self.failure)
            return
        try:
            commit = await self._attempt(publication, weights, release)
        except Dropped as dropped:
            self._give_up(publication, dropped.problem)
        except (Fenced, RankFailed) as problem:
            self._stop(problem, publication)
        except WeightwireError as problem:
            self._give_up(publication, problem)
        except asyncio.CancelledError:
            # Perhaps its commit was sent, and will arrive: nothing else may ever be sent in its place.
            self._stop(WeightwireError("the publisher was interrupted", hint="make a new one"), publication)
            raise
        except Exception as problem:
            # A bug, or no memory: what is held here may not be what was published, so nothing more may be.
            failure = WeightwireError(f"the publisher failed ({type(problem).__name__}: {problem})")
            failure.__cause__ = problem
            self._stop(failure, publication)
        else:
            publication.succeed(commit.record)
            release_all()
            await self._after(commit)
        finally:
            release_all()

    def _stop(self, failure: WeightwireError, publication: Publication) -> None:
        self.failure = failure
        publication.fail(failure)
        self._warn(failure.message)

    async def _attempt(self, publication: Publication, weights: Weights, release: Release) -> Sealed[Commit]:
        assert self.writer is not None
        assert self.copies is not None
        weights = self.copies.check(weights)  # those of a blocking publisher were not captured, so not checked
        if self.state is None:
            return await self._attempt_anchor(self.writer, publication, weights)
        return await self._attempt_delta(self.writer, self.state, publication, weights, release)

    async def _attempt_anchor(self, writer: ChainWriter, publication: Publication, weights: Weights) -> Sealed[Commit]:
        copies = self.copies
        assert copies is not None
        await self._runtime.run_in_thread(copy_weights, weights, copies.published)
        copies.release_all()
        publication.check()
        with tempfile.TemporaryFile() as spool:
            made, encoded = await self._encode_anchor(writer.next_version, spool)
            fields = {"kind": ANCHOR, "after": made.after}
            commit = await self._prepare(writer, publication, made, encoded, fields)
            await self._send(writer, commit)
        self.state = made.advance(State({}))
        self._count(commit.record)
        return commit

    async def _attempt_delta(
        self,
        writer: ChainWriter,
        state: State,
        publication: Publication,
        weights: Weights,
        release: Release,
    ) -> Sealed[Commit]:
        copies, threads = self.copies, self._settings.threads
        assert copies is not None
        async with self._stage("encode", writer.next_version) as encoding:
            # First the copy is moved forward, so that what was captured is free again; what it was is remembered.
            rolled = await self._runtime.run_in_thread(
                advance_copy, copies.published, weights, threads=threads, done=release
            )
            try:
                publication.check()
                delta = await self._runtime.run_in_thread(rolled.diff, state, threads=threads)
            except BaseException:
                await self._runtime.run_in_thread(rolled.undo)
                raise
            encoding.nbytes = delta.nbytes
        fields = {"kind": DELTA, "before": delta.before, "after": delta.after, "changed": delta.changed}
        try:
            commit = await self._prepare(writer, publication, delta, encoding.stage, fields)
        except BaseException:
            await self._runtime.run_in_thread(rolled.undo)
            raise
        await self._send(writer, commit)
        self.state = delta.advance(state)
        self._count(commit.record)
        return commit

    def _count(self, commit: Commit) -> None:
        """A version that has been committed."""
        if commit.kind == ANCHOR:
            self._anchor_size, self._since_anchor, self._versions_since_anchor = commit.nbytes, 0, 0
        else:
            self._since_anchor += commit.nbytes
            self._versions_since_anchor += 1

    async def _prepare(
        self,
        writer: ChainWriter,
        publication: Publication,
        made: Delta,
        encoded: StageTiming,
        fields: Mapping[str, Any],
    ) -> Sealed[Commit]:
        """Everything up to the commit itself. It may be given up: nobody has seen anything of it."""
        stages = {**publication.stages, "encode": encoded}
        files: tuple[DataFile, ...] = ()
        if made.entries:
            async with self._stage("upload", writer.next_version) as uploading:
                uploading.nbytes = made.nbytes
                file = await self._uploads.name(fields["kind"], writer.next_version, writer.epoch, made)
                await self._uploads.patiently(lambda: self._uploads.put(file, made))
            files, stages["upload"] = (file,), uploading.stage
        metrics = finite(publication.metrics)
        return await self._uploads.patiently(
            lambda: writer.prepare(step=publication.step, metrics=metrics, stages=stages, files=files, **fields)
        )

    async def _send(self, writer: ChainWriter, commit: Sealed[Commit]) -> None:
        async with self._stage("commit", commit.record.version):
            await writer.send(commit)

    async def _after(self, commit: Sealed[Commit]) -> None:
        """What follows a version, without holding up the next one."""
        assert self.writer is not None
        self._hint(self.writer)
        if self._anchor_is_due():
            await self._add_anchor(self.writer, commit)

    def _hint(self, writer: ChainWriter) -> None:
        if not any(task.get_name() == "hint" for task in self._behind):
            self.go_behind(writer.hint(self._newest_anchor), "hint")

    def abandon(self) -> None:
        """Fails what nobody will publish any more."""
        left = self.copies.take() if self.copies is not None else None
        if left is not None:
            left.fail(self.failure or WeightwireError("the publisher was closed before this was published"))

    # --- anchors -------------------------------------------------------------------------------------------------

    def _anchor_is_due(self) -> bool:
        if any(task.get_name() == "anchor" for task in self._behind):
            return False
        if self._settings.anchor_every is not None:
            return self._versions_since_anchor >= self._settings.anchor_every
        assert self.run_record is not None
        size = self._anchor_size or _ANCHOR_SHARE * self.run_record.nbytes
        return self._since_anchor > size / 2

    async def _add_anchor(self, writer: ChainWriter, commit: Sealed[Commit]) -> None:
        """Encoded now, from the published state, which must not change meanwhile; uploaded behind what comes next."""
        self._since_anchor, self._versions_since_anchor = 0, 0
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed when it has been uploaded)
        try:
            made, _ = await self._encode_anchor(commit.record.version, spool)
        except BaseException as problem:
            spool.close()
            if not isinstance(problem, WeightwireError | OSError | MemoryError):
                raise
            self._warn(f"no anchor for version {commit.record.version} ({problem})")
            return
        self.go_behind(self._upload_anchor(writer, commit.record, made, spool), "anchor")

    async def _encode_anchor(self, version: int, spool: BinaryIO) -> tuple[Delta, StageTiming]:
        assert self.copies is not None
        async with self._stage("encode", version) as encoding:
            made = await self._runtime.run_in_thread(
                anchor, self.copies.published, spool=spool, threads=self._settings.threads
            )
            encoding.nbytes = made.nbytes
        return made, encoding.stage

    async def _upload_anchor(self, writer: ChainWriter, commit: Commit, made: Delta, spool: BinaryIO) -> None:
        try:
            file = await self._uploads.name(ANCHOR, commit.version, writer.epoch, made)
            await self._uploads.put(file, made)
            await self._add_shortcut(commit, (file,))
        except WeightwireError as problem:
            self._warn(f"no anchor for version {commit.version} ({problem.message})")
        finally:
            spool.close()

    async def _add_shortcut(self, commit: Commit, files: tuple[DataFile, ...]) -> None:
        shortcut = Shortcut(run=commit.run, version=commit.version, kind="anchor", after=commit.after, files=files)
        sealed = seal(shortcut)
        path = shortcut_path(sealed)
        await settle(self.bucket, path, sealed.data, self._runtime, self._warn, tries=5)
        self._anchor_size, self._newest_anchor = shortcut.nbytes, path

    def go_behind(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Something that holds up no version; `close` waits for it."""
        task = asyncio.create_task(work, name=name)
        self._behind[task] = None
        task.add_done_callback(self._behind.pop)

    # --- others --------------------------------------------------------------------------------------------------

    async def wait_for_replicas(self, version: int, count: int) -> None:
        """Until so many followers have said that they hold a version, or a later one."""
        while True:
            try:
                reached = [one for one in await self._heartbeats() if one.reached >= version]
            except BucketError as problem:
                self._warn(f"{problem.message}; trying again")
                reached = []
            if len(reached) >= count:
                return
            await asyncio.sleep(0.2 + 0.1 * self._runtime.random.random())

    async def _heartbeats(self) -> list[Heartbeat]:
        found = []
        for one in await self.bucket.list("replicas/"):
            try:
                found.append(unseal(await self.bucket.get(one.path), Heartbeat, one.path).record)
            except WeightwireError:
                continue  # gone meanwhile, or no heartbeat
        run, version = self.run_record, self.version
        if run is None or version is None:
            return []
        # One that claims to be ahead of everybody is none of ours.
        return [one for one in found if one.run == run.run and one.version <= version]

    async def close(self) -> None:
        """Lets `run` end once everything is published, and waits for what goes on behind."""
        self._closing = True
        self._wake.set()
        while self._behind:
            await asyncio.gather(*self._behind, return_exceptions=True)

    def _warn(self, message: str) -> None:
        self._emit(Event("warning", at=self._runtime.time(), message=message))

    @asynccontextmanager
    async def _stage(self, name: str, version: int) -> AsyncIterator[_Timing]:
        timing = _Timing(self._runtime)
        yield timing
        stage = timing.stage
        self._emit(Event(name, version, stage.bytes, stage.seconds, stage.at))


class _Timing:
    """A stage under way."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began = runtime.clock()
        self.nbytes = 0

    @property
    def stage(self) -> StageTiming:
        return StageTiming(round(self._runtime.clock() - self._began, 6), self.nbytes, self._runtime.time())


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity."""
    values = {str(name): float(value) for name, value in metrics.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
