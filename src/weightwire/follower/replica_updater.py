"""Brings a replica forward: fetches what leads to a version, verifies it, and applies it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from weightwire.catchup import ChainPath, Fetched, Fetcher, fetch_side_files, restore_weights
from weightwire.chain import Commit, Run, Sealed
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.run_position import RunPosition
from weightwire.replica import Position
from weightwire.weights import nbytes_of

__all__ = ["Reached", "ReplicaUpdater"]

Reached = Callable[[Sealed[Commit], int, float], None]
"""Hears of each version that the replica has reached, the bytes that it took, and the seconds to apply them."""

_SMALL = 64 << 20  # of a replica this small, `current` is always the newest version


class ReplicaUpdater:
    """Changes a replica, which is in use by nobody else while `using` is held."""

    def __init__(
        self,
        context: FollowContext,
        fetcher: Fetcher,
        position: RunPosition,
        patches: PatchQueue,
        reached: Reached,
    ) -> None:
        self.using = asyncio.Lock()
        self._context = context
        self._runtime, self._replica = context.runtime, context.replica
        self._fetcher = fetcher
        self._position = position
        self._patches = patches
        self._reached = reached

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
            self._position.advance(commit)
            await self._patches.add(patch)
            # While nobody can take it: whoever takes a version has heard of it before.
            self._reached(commit, fetched.nbytes, self._runtime.clock() - began)

    async def rebuild(self, run: Run, path: ChainPath) -> None:
        """All weights from the bucket, beside the old ones; then in their place, all at once."""
        began = self._runtime.clock()
        files = await fetch_side_files(self._context.bucket, run)
        target = path.target
        rebuild = self._replica.rebuild(run.schema, files)
        await self._runtime.run_in_thread(rebuild.__enter__)
        try:
            base, threads = self._context.base, self._context.threads
            state = await restore_weights(path, self._fetcher, rebuild, self._runtime, base=base, threads=threads)
            async with self.using:
                position = Position(run.run, target.record.version, target.sha256)
                await self._runtime.run_in_thread(rebuild.finish, position, state)
                self._position.advance(target)
                self._patches.drop()
                self._reached(target, path.nbytes, self._runtime.clock() - began)
        finally:
            await self._runtime.run_in_thread(rebuild.__exit__, None, None, None)

    async def refresh_current(self) -> None:
        """Caught up: makes a new `current` where that is cheap, or overdue."""
        nbytes = nbytes_of(self._replica.weights)
        if nbytes <= _SMALL or self._replica.journal_bytes > nbytes // 4:
            async with self.using:
                await self._runtime.run_in_thread(self._replica.make_current)
