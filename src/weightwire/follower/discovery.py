"""Takes the replica to the newest version: discover -> plan -> fetch -> verify -> apply. Routes around lost data."""

from __future__ import annotations

from weightwire.catchup import LOST_FOR_GOOD, ChainPath, Fetcher, NoPath, around_lost_data, plan, plan_newest
from weightwire.chain import ChainReader, Commit, Run, Sealed
from weightwire.errors import BrokenChain, BucketError, ForeignRun, WeightwireError
from weightwire.follower.damage_backoff import DamageBackoff
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.freshness import Freshness
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.pushed_commits import PushedCommits
from weightwire.follower.replica_updater import ReplicaUpdater
from weightwire.follower.run_position import RunPosition

__all__ = ["Discovery"]

_NEAR = 64  # versions that are read one by one, without a plan


class Discovery:
    """Call `look` from one task at a time."""

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
        self._damage = DamageBackoff(fetcher, context.runtime)
        self._position = position
        self.pushed = PushedCommits(position)
        self._patches = patches
        self._updater = updater
        self._freshness = Freshness(context)
        self._warned: set[str] = set()  # messages about lost data
        self._is_refreshed = True  # `current` needs no refresh

    async def look(self, *, retries_later: bool = False) -> bool:
        """Discovers new versions and applies them. Returns whether there were any.

        If a version cannot be rebuilt, goes as far as possible and raises the reason. With `retries_later`, files that
        were damaged before are not fetched again at every look, and `current` may be renewed while later looks go on.
        """
        try:
            chain = await self._position.open()
            if self._position.is_outdated:
                self._patches.drop()
                chain = await self._position.reopen()
            await self._freshness.check(chain)
            held = self._position.commit
            try:
                if await self._apply_all(chain, retries_later):
                    self._freshness.check_reached(self._position.head, chain.bucket.url)
            except WeightwireError:
                await self._refresh(held, beside=retries_later)
                raise
        except WeightwireError as problem:
            is_open = self._position.commit is not None
            if isinstance(problem, BrokenChain | ForeignRun) or (not is_open and _is_refusal(problem)):
                self._position.close()  # run.json may be another one by now, or was damaged when it was read
            raise
        return await self._refresh(held, beside=retries_later)

    async def _refresh(self, before: Sealed[Commit] | None, *, beside: bool) -> bool:
        moved = self._position.commit not in (None, before)
        if self._position.version is not None:
            await self._position.seen.hold(self._position.version)
        self._is_refreshed = self._is_refreshed and not moved
        if not self._is_refreshed:
            await self._updater.refresh_current(beside=beside)
            self._is_refreshed = True
        return moved

    async def _apply_all(self, chain: ChainReader, retries_later: bool) -> bool:
        """Applies all versions in the bucket, around files that turn out to be lost.

        Returns whether it looked for later ones. After a push it does not: the push was the newest a moment ago.
        """
        self._damage.forget(only_due=retries_later)

        async def advance_to_the_end() -> bool:
            if await self._advance_as_pushed(chain):
                while await self._advance_as_pushed(chain):
                    pass
                return False
            while await self._advance(chain):
                pass
            return True

        try:
            is_at_end = await around_lost_data(self._fetcher, advance_to_the_end, self._warn_once)
        except LOST_FOR_GOOD as problem:
            if (version := self._position.version) is None:
                raise
            raise problem.reworded(
                f"{problem.message}; this replica stays at version {version}", hint=problem.hint
            ) from problem
        if is_at_end:
            self._damage.settle()
        return is_at_end

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._context.warn(message, self._position.version)

    async def _advance_as_pushed(self, chain: ChainReader) -> bool:
        """Advances by the next version if its commit was pushed and the bucket has it. Returns whether it did."""
        began = self._context.runtime.clock()
        commit = await self.pushed.next(chain)
        if commit is None or not self._is_cheap([commit], chain.run):
            return False

        async def is_in_bucket() -> bool:
            if not await chain.confirm(commit):
                return False
            await self._position.seen.see(chain, commit)
            self._position.head = max(self._position.head, commit.record.version)
            self._context.stage("discover", commit.record.version, 0, self._context.runtime.clock() - began)
            return True

        return await self._updater.apply_if(commit, is_in_bucket())

    async def _advance(self, chain: ChainReader) -> bool:
        """Advances by some versions, by the cheapest path. Returns whether there were any."""
        began = self._context.runtime.clock()
        held = self._position.commit
        near = await chain.read_after(held, _NEAR) if held is not None else None
        if held is not None and not near:
            self._position.seen.check_shown(held.record.version, chain.bucket.url)
            await self._position.recheck(chain)
            return False
        if near:
            await self._position.seen.see(chain, near[-1])
        if near is not None and self._is_cheap(near, chain.run):
            self._position.head = max(self._position.head, near[-1].record.version)
            self._context.stage("discover", near[-1].record.version, 0, self._context.runtime.clock() - began)
            await self._updater.apply(near)
            return True
        head = await chain.read_head(held.record.version if held else -1)
        if head is None:
            self._position.seen.check_shown(-1, chain.bucket.url)
            return False
        await self._position.seen.see(chain, head)
        if not head.record.after or (held and head.sha256 == held.sha256):
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
        """Plans a path to the newest version, or to the newest one that can be rebuilt, if that is an advance."""
        held, lost = self._position.commit, self._fetcher.lost
        try:
            return await plan(chain, head, held, lost)
        except NoPath:
            path = await plan_newest(chain, head, held, lost)
            if not self._position.leads_on(path):
                raise
            return path

    def _is_cheap(self, commits: list[Sealed[Commit]], run: Run) -> bool:
        """Whether these deltas are cheaper than any anchor. Saves a listing of the anchors."""
        files = [file for commit in commits for file in commit.record.files]
        whole = not any(file.path in self._fetcher.lost for file in files)
        return whole and len(commits) < _NEAR and sum(file.size for file in files) * 2 <= run.nbytes


def _is_refusal(problem: WeightwireError) -> bool:
    """Whether something was read and refused, as opposed to a store that does not answer."""
    return not isinstance(problem, BucketError)
