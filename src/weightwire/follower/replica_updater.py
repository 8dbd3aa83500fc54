"""Brings a replica forward: fetches what leads to a version, verifies it, and applies it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from weightwire.bucket import Bucket
from weightwire.catchup import ChainPath, Fetched, Fetcher, fetch_side_files, restore_weights
from weightwire.chain import Commit, Run, Sealed
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.standing import Standing
from weightwire.replica import Position, Replica
from weightwire.system import Runtime
from weightwire.weights import Weights, nbytes_of

__all__ = ["Reached", "ReplicaUpdater"]

Reached = Callable[[Sealed[Commit], int, float], None]
"""Hears of each version that the replica has reached, the bytes that it took, and the seconds to apply them."""

_SMALL = 64 << 20  # of a replica this small, `current` is always the newest version


class ReplicaUpdater:
    """Changes a replica, which is in use by nobody else while `using` is held."""

    def __init__(
        self,
        bucket: Bucket,
        runtime: Runtime,
        replica: Replica,
        fetcher: Fetcher,
        standing: Standing,
        patches: PatchQueue,
        reached: Reached,
        *,
        base: Weights | None,
        threads: int | None,
    ) -> None:
        self.using = asyncio.Lock()
        self._bucket = bucket
        self._runtime = runtime
        self._replica = replica
        self._fetcher = fetcher
        self._standing = standing
        self._patches = patches
        self._reached = reached
        self._base = base
        self._threads = threads

    async def apply(self, commits: Sequence[Sealed[Commit]]) -> None:
        """One version after the other, from the one that is held."""
        async for commit, fetched in self._fetcher.in_turn(commits):
            await self._apply(commit, fetched)

    async def _apply(self, commit: Sealed[Commit], fetched: Fetched) -> None:
        began = self._runtime.clock()
        position = Position(commit.record.run, commit.record.version, commit.sha256)
        async with self.using:
            with self._fetcher.noting_lost(commit.record.files):
                patch = await self._runtime.run_in_thread(
                    self._replica.advance, fetched.deltas, position, commit.record.after
                )
            self._standing.advance(commit)
            await self._patches.add(patch)
            # While nobody can take it: whoever takes a version has heard of it before.
            self._reached(commit, fetched.nbytes, self._runtime.clock() - began)

    async def rebuild(self, run: Run, path: ChainPath) -> None:
        """All weights from the bucket, beside the old ones; then in their place, all at once."""
        began = self._runtime.clock()
        files = await fetch_side_files(self._bucket, run)
        target = path.target
        rebuild = self._replica.rebuild(run.schema, files)
        await self._runtime.run_in_thread(rebuild.__enter__)
        try:
            state = await restore_weights(
                path, self._fetcher, rebuild, self._runtime, base=self._base, threads=self._threads
            )
            async with self.using:
                position = Position(run.run, target.record.version, target.sha256)
                await self._runtime.run_in_thread(rebuild.finish, position, state)
                self._standing.advance(target)
                self._patches.drop()
                self._reached(target, path.nbytes, self._runtime.clock() - began)
        finally:
            await self._runtime.run_in_thread(rebuild.__exit__, None, None, None)

    async def settle(self) -> None:
        """Caught up: makes a new `current` where that is cheap, or overdue."""
        nbytes = nbytes_of(self._replica.weights)
        if nbytes <= _SMALL or self._replica.journal_bytes > nbytes // 4:
            async with self.using:
                await self._runtime.run_in_thread(self._replica.make_current)
