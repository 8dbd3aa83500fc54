"""Verifies a run: its records (`chain_walk`), its bytes (`data_check`) and, by rebuilding them, its weights."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np

from weightwire.bucket import Bucket
from weightwire.catchup import ChainPath, Fetched, Fetcher, apply_version, load_anchor, restore_weights
from weightwire.chain import ANCHOR, BASE, DELTA, Run, Trust, read_run
from weightwire.delta import Delta, State
from weightwire.errors import BucketError, CorruptDelta, NotFound, UnsupportedFormat, WeightwireError
from weightwire.inspection.chain_walk import ChainWalk
from weightwire.inspection.data_check import DataCheck
from weightwire.inspection.findings import Findings, ProgressListener, ReadProgress, Verification, VersionFiles
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
    trust: Trust | None = None,
    threads: int | None = None,
    progress: ProgressListener = _nothing,
) -> Verification:
    """Verifies a run as it is at the start. Versions that are published meanwhile are left out.

    `rebuild` also rebuilds the weights version by version, from the `base` checkpoint of the run or the oldest anchor.
    That takes as much memory as the weights.
    """
    walk = ChainWalk(bucket, await read_run(bucket), Findings(bucket.url), trust)
    check = DataCheck(walk, runtime, ReadProgress(progress))
    await walk.walk()
    await check.list_data()
    await check.check_side_files()
    if rebuild:
        await _RebuildCheck(walk, check, runtime, base, threads).run()
    else:
        await check.check_all()
    check.check_newest()
    return walk.result()


class _RebuildCheck:
    """Rebuilds the weights version by version. Reads every file once."""

    def __init__(
        self, walk: ChainWalk, check: DataCheck, runtime: Runtime, base: Weights | None, threads: int | None
    ) -> None:
        self._walk, self._check, self._findings = walk, check, walk.findings
        self._runtime = runtime
        self._base = base
        self._threads = threads
        self._fetcher = Fetcher(walk.bucket, runtime)
        self._targets = _allocate(walk.run)
        self._state: State | None = None  # of the targets; None if they do not hold the current version

    async def run(self) -> None:
        async with aclosing(self._in_turn()) as fetched:
            async for entry, held in fetched:
                self._state = await self._state_after(entry, held)
                if self._state is not None:
                    self._findings.note_rebuilt(entry.version)
                for one in held or ():
                    self._fetcher.release(one)
        begun = [entry for entry in self._walk.files if entry.after]
        if begun and not self._findings.rebuilt:
            what = "cannot be rebuilt: the run has no anchor, and its base checkpoint is not on this machine"
            self._findings.add(begun[0].version, begun[0].path, what)

    async def _in_turn(self) -> AsyncGenerator[tuple[VersionFiles, list[Fetched] | None], None]:
        """Yields each entry with its fetched files, and fetches the next one ahead."""
        waiting = deque(self._walk.files)
        ahead: deque[asyncio.Task[list[Fetched] | None]] = deque()
        try:
            for entry in self._walk.files:
                while waiting and len(ahead) < 2:
                    ahead.append(asyncio.create_task(self._fetch(waiting.popleft())))
                yield entry, await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _fetch(self, entry: VersionFiles) -> list[Fetched] | None:
        """Fetches all files of an entry. Returns None if one is missing or damaged."""
        held: list[Fetched] = []
        for file in entry.files:
            try:
                if await self._check.is_there(entry, file):
                    held.append(await self._fetcher.fetch((file,)))
                    self._check.progress.add(file.size)
                    if not self._check.check_header(entry, file, held[-1].deltas[0]):
                        self._fetcher.release(held.pop())
            except NotFound:
                await self._check.miss(entry, file)
            except (CorruptDelta, UnsupportedFormat) as problem:
                self._findings.add(entry.version, file.path, problem)
        if len(held) == len(entry.files):
            return held
        for one in held:
            self._fetcher.release(one)
        return None

    async def _state_after(self, entry: VersionFiles, held: list[Fetched] | None) -> State | None:
        """The state after an entry. None if it cannot be reached."""
        state = self._state
        if entry.kind == BASE:
            return await self._begin_with_base(entry.version)
        if held is None:
            return state if entry.is_beside else None
        deltas = [delta for one in held for delta in one.deltas]
        try:
            if entry.kind == ANCHOR:
                return await self._use_anchor(entry, deltas)
            if entry.kind == DELTA and state is not None:
                return await self._runtime.run_in_thread(
                    apply_version, self._targets, deltas, state, entry.after, self._threads
                )
            return state
        except BucketError:
            raise
        except WeightwireError as problem:
            self._findings.add(entry.version, entry.files[0].path, problem)
            return state if entry.is_beside else None

    async def _use_anchor(self, entry: VersionFiles, deltas: Sequence[Delta]) -> State | None:
        """Loads an anchor. A corrupt anchor leaves the weights that were rebuilt so far unchanged."""
        state = self._state
        reached = await self._runtime.run_in_thread(
            load_anchor, self._targets, deltas, self._threads, keep=state is not None
        )
        if reached.hex != entry.after:
            self._findings.add(entry.version, entry.files[0].path, f"leads to another state than {entry.path} names")
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
            return None  # not on this machine: start at the first anchor


def _allocate(run: Run) -> dict[str, Tensor]:
    """Zeroed memory for the weights of a run."""
    return {
        name: Tensor.at(np.zeros(dtype.nbytes(shape) or 0, np.uint8), 0, dtype, shape)
        for name, (dtype, shape) in run.schema.items()
    }
