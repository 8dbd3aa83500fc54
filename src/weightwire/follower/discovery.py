"""The way to the newest version: discover -> plan -> fetch -> verify -> apply, around data that is lost."""

from __future__ import annotations

from weightwire.catchup import LOST_FOR_GOOD, ChainPath, Fetcher, NoWay, around_lost_data, plan, plan_newest
from weightwire.chain import ChainReader, Commit, Run, Sealed
from weightwire.errors import ForeignRun, WeightwireError
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.replica_updater import ReplicaUpdater
from weightwire.follower.run_position import RunPosition

__all__ = ["Discovery"]

_NEAR = 64  # versions that are simply read one after the other


class Discovery:
    """`look` goes as far as the bucket goes. One at a time."""

    def __init__(
        self,
        context: FollowContext,
        fetcher: Fetcher,
        position: RunPosition,
        patches: PatchQueue,
        updater: ReplicaUpdater,
    ) -> None:
        self._context = context
        self._fetcher = fetcher
        self._position = position
        self._patches = patches
        self._updater = updater
        self._told: set[str] = set()  # what has been said of data that is gone
        self._is_refreshed = True  # `current` is as new as it should be

    async def look(self) -> bool:
        """Discovers what is new and applies all of it. Returns whether there was anything.

        Where not all of it can be rebuilt, it goes as far as it can, and then raises what keeps it from going on.
        """
        try:
            chain = await self._position.open()
            if self._position.is_outdated:
                self._patches.drop()
                chain = await self._position.reopen()
            held = self._position.commit
            try:
                await self._go_on(chain)
            except WeightwireError:
                await self._refresh(held)
                raise
        except ForeignRun:
            self._position.close()
            raise
        return await self._refresh(held)

    async def _refresh(self, before: Sealed[Commit] | None) -> bool:
        moved = self._position.commit not in (None, before)
        self._is_refreshed = self._is_refreshed and not moved
        if not self._is_refreshed:
            await self._updater.refresh_current()
            self._is_refreshed = True
        return moved

    async def _go_on(self, chain: ChainReader) -> None:
        """As far as the bucket goes, around each file that turns out to be lost."""
        self._fetcher.lost.clear()  # what was gone may be back

        async def advance_to_the_end() -> None:
            while await self._advance(chain):
                pass

        try:
            await around_lost_data(self._fetcher, advance_to_the_end, self._warn_once)
        except LOST_FOR_GOOD as problem:
            if (version := self._position.version) is None:
                raise
            raise problem.reworded(
                f"{problem.message}; this replica stays at version {version}", hint=problem.hint
            ) from problem

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._context.warn(message, self._position.version)

    async def _advance(self, chain: ChainReader) -> bool:
        """Some versions further, by the cheapest way."""
        began = self._context.runtime.clock()
        held = self._position.commit
        near = await chain.read_after(held, _NEAR) if held is not None else None
        if near is not None and not near:
            await self._position.recheck(chain)
            return False
        if near is not None and self._is_cheap(near, chain.run):
            self._position.head = max(self._position.head, near[-1].record.version)
            self._context.stage("discover", near[-1].record.version, 0, self._context.runtime.clock() - began)
            await self._updater.apply(near)
            return True
        head = await chain.read_head(held.record.version if held else -1)
        if head is None or not head.record.after or (held and head.sha256 == held.sha256):
            return False
        self._position.head = head.record.version
        path = await self._plan(chain, head)
        await self._position.check_history(chain, path)
        self._context.stage("discover", head.record.version, 0, self._context.runtime.clock() - began)
        if path.start is None:
            await self._updater.apply(path.commits)
        else:
            await self._updater.rebuild(chain.run, path)
        return True

    async def _plan(self, chain: ChainReader, head: Sealed[Commit]) -> ChainPath:
        """The way to the newest version. Where none is left, to the newest one that can be rebuilt, if that is new."""
        held, lost = self._position.commit, self._fetcher.lost
        try:
            return await plan(chain, head, held, lost)
        except NoWay:
            path = await plan_newest(chain, head, held, lost)
            if not self._position.leads_on(path):
                raise
            return path

    def _is_cheap(self, commits: list[Sealed[Commit]], run: Run) -> bool:
        """That going on is surely cheaper than any anchor, without asking what anchors there are."""
        files = [file for commit in commits for file in commit.record.files]
        whole = not any(file.path in self._fetcher.lost for file in files)
        return whole and len(commits) < _NEAR and sum(file.size for file in files) * 2 <= run.nbytes
