"""Checks everything that a run has in its bucket, and rebuilds its weights.

`chain_walk` reads the records and `data_check` the bytes; what needs weights is here. Changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np

from weightwire.bucket import Bucket
from weightwire.catchup import ChainPath, Fetched, Fetcher, apply_version, load_anchor, restore_weights
from weightwire.chain import ANCHOR, BASE, DELTA, Run, read_run
from weightwire.delta import Delta, State
from weightwire.errors import BucketError, CorruptDelta, NotFound, UnsupportedFormat, WeightwireError
from weightwire.inspection.chain_walk import ChainWalk
from weightwire.inspection.data_check import DataCheck
from weightwire.inspection.findings import Findings, ProgressListener, ReadProgress, Verification, Way
from weightwire.system import Runtime
from weightwire.weights import Tensor, Weights

__all__ = ["verify_run"]


def _nothing(done: int, total: int) -> None:
    pass


async def verify_run(
    bucket: Bucket,
    runtime: Runtime,
    *,
    rebuild: bool = False,
    base: Weights | None = None,
    threads: int | None = None,
    progress: ProgressListener = _nothing,
) -> Verification:
    """Checks a run as it is when this begins: what is published meanwhile is left out.

    `rebuild` also rebuilds the weights, version by version, from the `base` that the run started from or the oldest
    anchor there is. That takes as much memory as they have.
    """
    walk = ChainWalk(bucket, await read_run(bucket), Findings(bucket.url))
    check = DataCheck(walk, runtime, ReadProgress(progress))
    await walk.walk()
    await check.list_data()
    await check.check_side_files()
    if rebuild:
        await _RebuildCheck(walk, check, runtime, base, threads).run()
    else:
        await check.check_all()
    return walk.result()


class _RebuildCheck:
    """The weights, version by version. Every file is read once."""

    def __init__(
        self, walk: ChainWalk, check: DataCheck, runtime: Runtime, base: Weights | None, threads: int | None
    ) -> None:
        self._walk, self._check, self._findings = walk, check, walk.findings
        self._runtime = runtime
        self._base = base
        self._threads = threads
        self._fetcher = Fetcher(walk.bucket, runtime)
        self._targets = _allocate(walk.run)
        self._state: State | None = None  # of what the targets hold, if that is the version we are at

    async def run(self) -> None:
        async with aclosing(self._in_turn()) as fetched:
            async for way, held in fetched:
                self._state = await self._go_on(way, held)
                if self._state is not None:
                    self._findings.note_rebuilt(way.version)
                for one in held or ():
                    self._fetcher.release(one)
        begun = [way for way in self._walk.ways if way.after]
        if begun and not self._findings.rebuilt:
            what = "cannot be rebuilt: no anchor is there, and the base checkpoint is not here"
            self._findings.add(begun[0].version, begun[0].path, what)

    async def _in_turn(self) -> AsyncGenerator[tuple[Way, list[Fetched] | None], None]:
        """One is fetched while the one before it is dealt with."""
        waiting = deque(self._walk.ways)
        ahead: deque[asyncio.Task[list[Fetched] | None]] = deque()
        try:
            for way in self._walk.ways:
                while waiting and len(ahead) < 2:
                    ahead.append(asyncio.create_task(self._fetch(waiting.popleft())))
                yield way, await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _fetch(self, way: Way) -> list[Fetched] | None:
        """All files of a way, or None."""
        held: list[Fetched] = []
        for file in way.files:
            try:
                if await self._check.is_there(way, file):
                    held.append(await self._fetcher.fetch((file,)))
                    self._check.progress.add(file.size)
                    if not self._check.check_header(way, file, held[-1].deltas[0]):
                        self._fetcher.release(held.pop())
            except NotFound:
                await self._check.miss(way, file)
            except (CorruptDelta, UnsupportedFormat) as problem:
                self._findings.add(way.version, file.path, problem)
        if len(held) == len(way.files):
            return held
        for one in held:
            self._fetcher.release(one)
        return None

    async def _go_on(self, way: Way, held: list[Fetched] | None) -> State | None:
        """The state after a way, if it can be reached."""
        state = self._state
        if way.kind == BASE:
            return await self._begin_with_base(way.version)
        if held is None:
            return state if way.is_beside else None
        deltas = [delta for one in held for delta in one.deltas]
        try:
            if way.kind == ANCHOR:
                return await self._use_anchor(way, deltas)
            if way.kind == DELTA and state is not None:
                return await self._runtime.run_in_thread(
                    apply_version, self._targets, deltas, state, way.after, self._threads
                )
            return state
        except BucketError:
            raise
        except WeightwireError as problem:
            self._findings.add(way.version, way.files[0].path, problem)
            return state if way.is_beside else None

    async def _use_anchor(self, way: Way, deltas: Sequence[Delta]) -> State | None:
        """Where there are weights already, they must be the same; if they are not, they stay."""
        state = self._state
        reached = await self._runtime.run_in_thread(
            load_anchor, self._targets, deltas, self._threads, keep=state is not None
        )
        if reached.hex != way.after:
            self._findings.add(way.version, way.files[0].path, f"leads to another state than {way.path} says")
            return None
        self._findings.compared += state is not None
        return reached

    async def _begin_with_base(self, version: int) -> State | None:
        commit = await self._walk.chain.read_linked(version, self._walk.hashes[version])
        path = ChainPath(commit.record, commit, ())
        try:
            return await restore_weights(
                path, self._fetcher, self._targets, self._runtime, base=self._base, threads=self._threads
            )
        except WeightwireError:
            if self._base is not None:
                raise
            return None  # it is not here: the first anchor will do


def _allocate(run: Run) -> dict[str, Tensor]:
    """Room for the weights of a run."""
    return {
        name: Tensor.at(np.zeros(dtype.nbytes(shape) or 0, np.uint8), 0, dtype, shape)
        for name, (dtype, shape) in run.schema.items()
    }
