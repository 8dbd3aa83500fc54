"""Advances a replica: fetches the files of a version, verifies and applies them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from weightwire.catchup import ChainPath, Fetched, Fetcher, fetch_side_files, restore_weights
from weightwire.chain import Commit, Run, Sealed
from weightwire.errors import WeightwireError
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.run_position import RunPosition
from weightwire.replica import CurrentRefresh, Position

__all__ = ["Reached", "ReplicaUpdater"]

Reached = Callable[[Sealed[Commit], int, float], None]
"""Called for each version reached, with the bytes fetched and the seconds to apply them."""

_SMALL = 64 << 20  # bytes; `current` of a smaller replica is always the newest version


class ReplicaUpdater:
    """Holds the lock `using` while it changes the replica."""

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
        self._refreshing: asyncio.Task[None] | None = None

    async def apply(self, commits: Sequence[Sealed[Commit]]) -> None:
        """Applies consecutive versions, starting from the one held."""
        self._fetcher.on_read = self._context.progress("fetch", sum(commit.record.nbytes for commit in commits))
        async for commit, fetched in self._fetcher.in_turn(commits):
            await self._apply(commit, fetched)

    async def apply_if(self, commit: Sealed[Commit], confirming: Coroutine[Any, Any, bool]) -> bool:
        """Applies the next version once its commit is confirmed. Fetches its files meanwhile.

        Returns whether it was confirmed. If not, nothing was learned about its files.
        """
        lost = dict(self._fetcher.lost)
        self._fetcher.on_read = self._context.progress("fetch", commit.record.nbytes)
        fetching = asyncio.create_task(self._fetcher.fetch(commit.record.files, commit.record.kind))
        is_confirmed = False
        try:
            is_confirmed = await confirming
            if is_confirmed:
                fetched = await fetching
                await self._apply(commit, fetched)
                self._fetcher.release(fetched)
            return is_confirmed
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            if not is_confirmed:
                self._fetcher.lost.clear()
                self._fetcher.lost.update(lost)

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
            # Under the lock: a version is reported before anyone can take it.
            self._reached(commit, fetched.nbytes, self._runtime.clock() - began)

    async def rebuild(self, run: Run, path: ChainPath) -> None:
        """Builds all weights beside the old ones, then replaces those at once."""
        began = self._runtime.clock()
        files = await fetch_side_files(self._context.bucket, run)
        target = path.target
        rebuild = self._replica.rebuild(run.schema, files)
        await self._runtime.run_in_thread(rebuild.__enter__)
        try:
            base, threads = self._context.base, self._context.threads
            state = await restore_weights(
                path,
                self._fetcher,
                rebuild,
                self._runtime,
                base=base,
                threads=threads,
                progress=self._context.progress,
            )
            async with self.using:
                position = Position(run.run, target.record.version, target.sha256)
                await self._runtime.run_in_thread(rebuild.finish, position, state)
                self._position.advance(target)
                self._patches.drop()
                self._reached(target, path.nbytes, self._runtime.clock() - began)
        finally:
            await self._runtime.run_in_thread(rebuild.__exit__, None, None, None)

    async def refresh_current(self, *, beside: bool) -> None:
        """Makes a new `current` if that is cheap or overdue. Called when the replica has caught up.

        With `beside`, a large one is made while the replica advances: see `stop`.
        """
        nbytes = self._replica.nbytes
        is_small, is_busy = nbytes <= _SMALL, self._refreshing is not None and not self._refreshing.done()
        if not is_small and (is_busy or self._replica.journal_bytes <= nbytes // 4):
            return
        async with self.using:
            refresh = None
            if beside and not is_small:
                refresh = await self._runtime.run_in_thread(self._replica.begin_refresh)
            if refresh is None:
                await self._runtime.run_in_thread(self._replica.make_current)
            else:
                self._refreshing = asyncio.create_task(self._refresh(refresh))

    async def _refresh(self, refresh: CurrentRefresh) -> None:
        is_made = False
        try:
            await self._runtime.run_in_thread(refresh.make_beside)
            is_made = True
        except (WeightwireError, MemoryError) as problem:
            reason = problem.message if isinstance(problem, WeightwireError) else "out of memory"
            self._context.warn(f"`current` was not renewed: {reason}", self._position.version)
        async with self.using:
            try:
                await self._runtime.run_in_thread(self._replica.finish_refresh, refresh, is_made=is_made)
            except WeightwireError as problem:
                self._context.warn(problem.message, self._position.version)

    async def stop(self) -> None:
        """Stops making a new `current`."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
