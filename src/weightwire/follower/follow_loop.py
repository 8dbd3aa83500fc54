"""7 follow, as coroutines: discover -> plan -> fetch -> verify -> apply.

Works over an injected bucket, runtime and replica; `follower` is its synchronous face. Never imports the publisher.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path as FilePath

from weightwire.bucket import Bucket
from weightwire.catchup import Fetched, Fetcher, fetch_side_files, restore_weights, schema_of
from weightwire.chain import (
    FENCE,
    RUN,
    ChainReader,
    Commit,
    Heartbeat,
    PassedVersion,
    Path,
    Run,
    Sealed,
    StageTiming,
    heartbeat_path,
    read_run,
    seal,
)
from weightwire.delta import Delta
from weightwire.errors import (
    BrokenChain,
    BucketError,
    CorruptDelta,
    DataGone,
    ForeignRun,
    NotFound,
    PermissionDenied,
    RunError,
    UnsupportedFormat,
    WeightwireError,
)
from weightwire.follower.update import Update
from weightwire.replica import Position, Replica
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener, careful
from weightwire.weights import Weights, schema_of_weights

__all__ = ["FollowLoop"]

_FASTEST, _SLOWEST = 0.2, 30.0  # seconds between two looks
_GENTLE = 2.0  # the fastest where requests are rationed
_LEASE = 60.0  # a follower that has not been heard of for so long holds back nothing
_NEAR = 64  # versions that are simply read one after the other
_SMALL = 64 << 20  # of a replica this small, `current` is always the newest version
_FEW = 1 << 20  # bytes of patches that are always worth keeping
_RECHECK = 15.0  # seconds
_RECENT = 100  # versions that a heartbeat tells of
_PATIENCE = 16  # how often a way is planned anew before data counts as gone


class FollowLoop:
    """One follower's work. `look` goes as far as the bucket goes; nothing else may run at the same time."""

    def __init__(
        self,
        bucket: Bucket,
        runtime: Runtime,
        replica: Replica,
        name: str,
        emit: Listener,
        *,
        base: Weights | None = None,
        threads: int | None = None,
    ) -> None:
        self.bucket = bucket
        self.replica = replica
        self.name = name
        self.chain: ChainReader | None = None
        self.commit: Sealed[Commit] | None = None  # of the version that the replica holds
        self.head = -1
        self.trouble = ""
        self._runtime = runtime
        self._emit = careful(emit)
        self._base = base
        self._threads = threads
        self._fetcher = Fetcher(bucket, runtime, replica.directory, self._tell)
        self._patches: list[Delta] | None = None  # since the update taken last; None: all must be loaded anew
        self._taken: int | None = None
        self._to_be_loaded = False  # that the update taken last had no patch
        self._using = asyncio.Lock()  # the replica
        self._looking = asyncio.Lock()
        self._told: set[str] = set()  # what has been said of data that is gone
        self._settled = True  # that `current` is as new as it should be
        self._reached: Sealed[Commit] | None = None  # never to go back behind it, even if the replica is lost
        self._rechecked = runtime.clock()
        self._wake = asyncio.Event()
        self._more = asyncio.Event()  # there is something to take
        self._unsaid = asyncio.Event()  # there is something for a heartbeat to say
        self._last_new = runtime.clock()
        self._last_time: float | None = None
        self._period = 0.0  # seconds between versions, lately
        self._heartbeats = True
        self._stages: dict[str, StageTiming] = {}
        self._passed: dict[int, dict[str, StageTiming]] = {}  # versions, and their stages
        self._recalled = False
        self._served: int | None = None
        self._engines_trouble = ""

    # --- the loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows until it is cancelled. Whatever goes wrong is told, once, and tried again."""
        beating = asyncio.create_task(self._beat_forever())
        failed = 0
        try:
            while True:
                try:
                    await self.look()
                    self._recovered()
                    failed = 0
                except WeightwireError as problem:
                    self._note(problem)
                    failed += 1
                except MemoryError:
                    self._note(WeightwireError("out of memory"))
                    failed += 1
                except Exception as problem:
                    self.trouble = f"the follower failed ({type(problem).__name__}: {problem})"
                    raise
                await self._sleep(failed)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    def wake(self) -> None:
        """Someone says that there is something new."""
        self._wake.set()

    async def _sleep(self, failed: int) -> None:
        fastest = _FASTEST if self.bucket.strict else _GENTLE
        # A fifth of the time between versions; less and less often where none have come for long.
        idle = self._runtime.clock() - self._last_new
        seconds = min(max(self._period / 5, idle / 50, fastest), _SLOWEST)
        if failed:
            seconds = min(seconds * 2.0 ** min(failed, 10), _SLOWEST)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds * (0.75 + self._runtime.random.random() / 2))
        self._wake.clear()

    def _note(self, problem: WeightwireError) -> None:
        if problem.message != self.trouble:
            self._emit(Event("warning", self.version, at=self._runtime.time(), message=str(problem)))
        self.trouble = problem.message

    def _recovered(self) -> None:
        if self.trouble:
            self._emit(Event("recovered", self.version, at=self._runtime.time(), message=f"over: {self.trouble}"))
        self.trouble = ""

    @property
    def version(self) -> int | None:
        return self.commit.record.version if self.commit else None

    # --- going on ------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """Discovers what is new and applies all of it. Returns whether there was anything."""
        async with self._looking:
            try:
                return await self._look()
            except ForeignRun:
                self.chain = None  # another run has taken its place: looked at anew the next time
                raise

    async def _look(self) -> bool:
        chain = await self._open()
        held = self.replica.position
        if self.commit is not None and (held is None or held.commit != self.commit.sha256):
            # It has just been lost, or was moved on by what was then interrupted.
            self.commit, self.chain, self._patches = None, None, None
            chain = await self._open()
        self._fetcher.lost.clear()  # what was gone may be back
        moved = False
        trouble: WeightwireError | None = None
        passed: list[str] = []
        for _ in range(_PATIENCE):
            lost = len(self._fetcher.lost)
            try:
                while await self._advance(chain):
                    moved = True
                self._tell_passed(passed)
                break
            except DataGone as problem:
                raise trouble or problem from problem
            except (NotFound, CorruptDelta) as problem:
                if len(self._fetcher.lost) == lost:
                    raise
                trouble = trouble or _gone(problem)
                passed.append(problem.message)
        else:
            assert trouble is not None
            raise trouble
        self._settled = self._settled and not moved
        if not self._settled:
            await self._settle_down()
            self._settled = True
        return moved

    def _tell_passed(self, passed: Iterable[str]) -> None:
        """Data that is gone, and that there was a way round: said once."""
        for message in passed:
            if message not in self._told:
                self._told.add(message)
                self._emit(Event("warning", self.version, message=f"{message}; there was another way"))

    async def _open(self) -> ChainReader:
        """Finds the run, and where this replica stands in it."""
        if self.chain is not None:
            return self.chain
        run = await read_run(self.bucket)
        chain = ChainReader(self.bucket, run)
        held = self.replica.position
        if self.replica.trouble:
            self._emit(Event("warning", at=self._runtime.time(), message=self.replica.trouble))
        if held is not None and held.run != run.run:
            self._emit(
                Event("warning", message=f"this replica is of run {held.run[:12]}; rebuilding it for {run.run[:12]}")
            )
            held, self._reached, self.commit, self._patches, self._taken = None, None, None, None, None
        if held is not None:
            commit = await chain.read(held.version)
            if commit is None:
                raise BrokenChain(
                    f"{self.bucket.url}: has no version {held.version}, which this replica holds; it stays as it is",
                    hint="the bucket was rolled back or replaced: follow it into a new directory",
                )
            if commit.sha256 != held.commit:
                raise BrokenChain(
                    f"{self.bucket.url}: has another version {held.version} than this replica; it stays as it is",
                    hint="the bucket was rolled back or replaced: follow it into a new directory",
                )
            _check_schema(self.replica.weights, run, self.bucket.url)
            self.commit = self._reached = chain.remember(commit)
            self.head = held.version
        self.chain = chain
        return chain

    async def _advance(self, chain: ChainReader) -> bool:
        """Some versions further, by the cheapest way."""
        began = self._runtime.clock()
        near = await chain.read_after(self.commit, _NEAR) if self.commit is not None else None
        if near is not None and not near:
            await self._recheck(chain)
            return False
        if near is not None and self._is_cheap(near, chain.run):
            self.head = max(self.head, near[-1].record.version)
            self._tell("discover", near[-1].record.version, 0, self._runtime.clock() - began)
            await self._apply_all(near)
            return True
        head = await chain.read_head(self.version if self.version is not None else -1)
        if head is None or not head.record.after or (self.commit and head.sha256 == self.commit.sha256):
            return False
        self.head = head.record.version
        path = await chain.plan(head, self.commit, self._fetcher.lost)
        await self._check_history(chain, path)
        self._tell("discover", self.head, 0, self._runtime.clock() - began)
        if path.start is None:
            await self._apply_all(path.commits)
        else:
            await self._rebuild(chain.run, path)
        return True

    async def _recheck(self, chain: ChainReader) -> None:
        """Nothing new may also mean that the run is gone, or another: now and then it is looked at again."""
        now = self._runtime.clock()
        if self.commit is None or now - self._rechecked < _RECHECK:
            return
        self._rechecked = now
        commit = await chain.read(self.commit.record.version)
        if commit is None or commit.sha256 != self.commit.sha256:
            self.chain = None
            await self._open()

    def _is_cheap(self, commits: list[Sealed[Commit]], run: Run) -> bool:
        """That going on is surely cheaper than any anchor, without asking what anchors there are."""
        files = [file for commit in commits for file in commit.record.files]
        whole = not any(file.path in self._fetcher.lost for file in files)
        return whole and len(commits) < _NEAR and sum(file.size for file in files) * 2 <= run.nbytes

    async def _check_history(self, chain: ChainReader, path: Path) -> None:
        """That a path from nothing leads to what follows from the version that was reached before."""
        reached = self._reached
        if path.start is None or reached is None:
            return
        version, target = reached.record.version, path.target
        if version > target.record.version or await chain.prove(target, version) != reached.sha256:
            raise BrokenChain(
                f"{self.bucket.url}: does not have the version {version} that was here; it stays as it is",
                hint="the bucket was rolled back or replaced: follow it into a new directory",
            )

    async def _apply_all(self, commits: list[Sealed[Commit]] | tuple[Sealed[Commit], ...]) -> None:
        async for commit, fetched in self._fetcher.in_turn(commits):
            await self._apply(commit, fetched)

    async def _apply(self, commit: Sealed[Commit], fetched: Fetched) -> None:
        began = self._runtime.clock()
        position = Position(commit.record.run, commit.record.version, commit.sha256)
        async with self._using:
            patch = await self._runtime.run_in_thread(
                self.replica.advance, fetched.deltas, position, commit.record.after
            )
            self.commit = self._reached = commit
            if self._patches is not None:
                self._patches.append(patch)
                await self._bound_patches()
        self._tell("apply", commit.record.version, fetched.nbytes, self._runtime.clock() - began)
        self._observe(commit)
        self._unsaid.set()
        self._more.set()

    async def _bound_patches(self) -> None:
        """What nobody takes must not grow without end."""
        assert self._patches is not None
        most = max(sum(tensor.nbytes for tensor in self.replica.weights.values()) // 4, _FEW)
        if sum(patch.nbytes for patch in self._patches) <= most:
            return
        merged = await self._runtime.run_in_thread(self.replica.merge, self._patches)
        self._patches = [merged] if merged.nbytes <= most else None

    async def _rebuild(self, run: Run, path: Path) -> None:
        """All weights anew, beside the old ones; then in their place, all at once."""
        began = self._runtime.clock()
        files = await fetch_side_files(self.bucket, run)
        target = path.target
        rebuild = self.replica.rebuild(schema_of(run), files)
        await self._runtime.run_in_thread(rebuild.__enter__)
        try:
            state = await restore_weights(
                path, self._fetcher, rebuild, self._runtime, base=self._base, threads=self._threads
            )
            async with self._using:
                position = Position(run.run, target.record.version, target.sha256)
                await self._runtime.run_in_thread(rebuild.finish, position, state)
                self.commit, self._reached, self._patches = target, target, None
        finally:
            await self._runtime.run_in_thread(rebuild.__exit__, None, None, None)
        self._tell("apply", target.record.version, path.nbytes, self._runtime.clock() - began)
        self._observe(target)
        self._unsaid.set()
        self._more.set()

    async def _settle_down(self) -> None:
        """Caught up: makes `current` anew where that is cheap, or overdue."""
        nbytes = sum(tensor.nbytes for tensor in self.replica.weights.values())
        if nbytes <= _SMALL or self.replica.journal_bytes > nbytes // 4:
            async with self._using:
                await self._runtime.run_in_thread(self.replica.checkpoint)

    def _observe(self, commit: Sealed[Commit]) -> None:
        """How often versions come, by the publisher's own clock."""
        self._last_new = self._runtime.clock()
        before = self._last_time
        self._last_time = commit.record.time
        if before is not None and commit.record.kind != FENCE and commit.record.time > before:
            self._period = 0.5 * (self._period or commit.record.time - before) + 0.5 * (commit.record.time - before)

    # --- for engines ---------------------------------------------------------------------------------------------

    async def take(self) -> Update | None:
        """What is new since the update taken last; None if nothing is."""
        async with self._using:
            if self.commit is None or self.replica.position is None or self._taken == self.version:
                return None
            patch: Delta | None = None
            if self._patches is not None:
                patch = self._patches[0] if len(self._patches) == 1 else None
                if patch is None:
                    patch = await self._runtime.run_in_thread(self.replica.merge, self._patches)
            self._patches, self._taken, self._to_be_loaded = [], self.version, patch is None
            record = self.commit.record
            return Update(record.version, record.step, record.after, patch, record.metrics, record.time)

    async def wait_for_more(self, timeout: float) -> None:
        """Until there is something to take, or some time has gone by."""
        if self.replica.position is not None and self._taken != self.version:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._more.wait(), timeout)
        self._more.clear()

    async def checkpoint(self) -> FilePath:
        """Makes `current` the version that is held; returns where it is.

        Whoever was told to load all weights has them from here: the next patch starts where this is.
        """
        async with self._using:
            path = await self._runtime.run_in_thread(self.replica.checkpoint)
            if self._to_be_loaded:
                self._patches, self._taken, self._to_be_loaded = [], self.version, False
            return path

    def serve(self, version: int | None, trouble: str, stages: Mapping[str, StageTiming]) -> None:
        """What the engines that are kept up to date from here serve: for the next heartbeat."""
        served = -1 if version is None else version
        self._stages.update(stages)
        if version is not None and stages:
            self._pass(version, stages)
        if (served, trouble) != (self._served, self._engines_trouble):
            self._served, self._engines_trouble = served, trouble
            self._unsaid.set()

    # --- heartbeats ----------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            self._unsaid.clear()
            await self.beat()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._unsaid.wait(), _LEASE / 4)

    async def beat(self) -> None:
        """Says how far this follower is. Without the right to write it follows all the same."""
        if self.chain is None:
            return
        if not self._recalled and self.head >= 0:
            await self._recall(self.chain)
        beat = Heartbeat(
            run=self.chain.run.run,
            name=self.name,
            version=self.version if self.version is not None else -1,
            head=self.head,
            lease=_LEASE,
            time=self._runtime.time(),
            host=platform.node(),
            trouble="; ".join(filter(None, (self.trouble, self._engines_trouble)))[:500],
            stages=self._stages,
            served=self._served,
            recent=tuple(PassedVersion(version, stages) for version, stages in sorted(self._passed.items())),
        )
        try:
            await self.bucket.put(heartbeat_path(self.name), seal(beat).data)
            self._heartbeats = True
        except PermissionDenied:
            if self._heartbeats:  # said once, and tried again: a key that has expired may come back
                self._emit(Event("warning", message="this key may not write, so nobody sees how far this follower is"))
            self._heartbeats = False
        except BucketError:
            pass  # the next one may get through

    async def _recall(self, chain: ChainReader) -> None:
        """What it said before it was started anew, so that the story of this replica goes on."""
        path = heartbeat_path(self.name)
        with suppress(BucketError, RunError, UnsupportedFormat):
            said = chain.unseal(await self.bucket.get(path), Heartbeat, path).record
            # None that is ahead of the run: it is none of ours, and would push out what is.
            known = [one for one in said.recent if 0 <= one.version <= self.head]
            self._passed = {one.version: dict(one.stages) for one in known[-_RECENT:]} | self._passed
        self._recalled = True

    def _tell(self, stage: str, version: int, nbytes: int, seconds: float) -> None:
        now = self._runtime.time()
        self._stages[stage] = StageTiming(round(seconds, 6), nbytes, now)
        self._pass(version, {stage: self._stages[stage]})
        self._emit(Event(stage, version, nbytes, seconds, now))

    def _pass(self, version: int, stages: Mapping[str, StageTiming]) -> None:
        self._passed.setdefault(version, {}).update(stages)
        while len(self._passed) > _RECENT:
            del self._passed[min(self._passed)]


def _gone(problem: NotFound | CorruptDelta) -> WeightwireError:
    if isinstance(problem, CorruptDelta):
        return problem
    return DataGone(f"{problem.message}, and no anchor leads past it", hint="publish a new anchor, or a new run")


def _check_schema(held: Weights, run: Run, url: str) -> None:
    if schema_of_weights(held) != dict(schema_of(run)):
        raise BrokenChain(
            f"{url}/{RUN}: names other tensors than this replica of the same run has; it stays as it is",
            hint="run.json must never change: restore it",
        )
