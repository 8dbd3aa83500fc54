"""The way to the newest version: discover -> plan -> fetch -> verify -> apply, around data that is gone."""

from __future__ import annotations

from collections.abc import Iterable

from weightwire.catchup import Fetcher, Heard
from weightwire.chain import ChainReader, Commit, Run, Sealed
from weightwire.errors import CorruptDelta, DataGone, ForeignRun, NotFound, WeightwireError
from weightwire.follower.patch_queue import PatchQueue
from weightwire.follower.replica_updater import ReplicaUpdater
from weightwire.follower.standing import Standing
from weightwire.system import Runtime
from weightwire.telemetry import Event, Listener

__all__ = ["Walk"]

_NEAR = 64  # versions that are simply read one after the other
_PATIENCE = 16  # how often a way is planned anew before data counts as gone


class Walk:
    """`look` goes as far as the bucket goes. One at a time."""

    def __init__(
        self,
        runtime: Runtime,
        fetcher: Fetcher,
        standing: Standing,
        patches: PatchQueue,
        updater: ReplicaUpdater,
        heard: Heard,
        emit: Listener,
    ) -> None:
        self._runtime = runtime
        self._fetcher = fetcher
        self._standing = standing
        self._patches = patches
        self._updater = updater
        self._heard = heard
        self._emit = emit
        self._told: set[str] = set()  # what has been said of data that is gone
        self._settled = True  # `current` is as new as it should be

    async def look(self) -> bool:
        """Discovers what is new and applies all of it. Returns whether there was anything."""
        try:
            chain = await self._standing.open()
            if self._standing.is_outdated:
                self._patches.drop()
                chain = await self._standing.reopen()
            moved = await self._go_on(chain)
        except ForeignRun:
            self._standing.close()
            raise
        self._settled = self._settled and not moved
        if not self._settled:
            await self._updater.settle()
            self._settled = True
        return moved

    async def _go_on(self, chain: ChainReader) -> bool:
        """As far as the bucket goes, planning again around each file that turns out to be lost."""
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
                return moved
            except DataGone as problem:
                raise trouble or problem from problem
            except (NotFound, CorruptDelta) as problem:
                if len(self._fetcher.lost) == lost:
                    raise
                trouble = trouble or _gone(problem)
                passed.append(problem.message)
        assert trouble is not None
        raise trouble

    def _tell_passed(self, passed: Iterable[str]) -> None:
        """Data that is gone, and that there was a way round: said once."""
        for message in passed:
            if message not in self._told:
                self._told.add(message)
                self._emit(Event("warning", self._standing.version, message=f"{message}; there was another way"))

    async def _advance(self, chain: ChainReader) -> bool:
        """Some versions further, by the cheapest way."""
        began = self._runtime.clock()
        held = self._standing.commit
        near = await chain.read_after(held, _NEAR) if held is not None else None
        if near is not None and not near:
            await self._standing.recheck(chain)
            return False
        if near is not None and self._is_cheap(near, chain.run):
            self._standing.head = max(self._standing.head, near[-1].record.version)
            self._heard("discover", near[-1].record.version, 0, self._runtime.clock() - began)
            await self._updater.apply(near)
            return True
        head = await chain.read_head(held.record.version if held else -1)
        if head is None or not head.record.after or (held and head.sha256 == held.sha256):
            return False
        self._standing.head = head.record.version
        path = await chain.plan(head, held, self._fetcher.lost)
        await self._standing.check_history(chain, path)
        self._heard("discover", head.record.version, 0, self._runtime.clock() - began)
        if path.start is None:
            await self._updater.apply(path.commits)
        else:
            await self._updater.rebuild(chain.run, path)
        return True

    def _is_cheap(self, commits: list[Sealed[Commit]], run: Run) -> bool:
        """That going on is surely cheaper than any anchor, without asking what anchors there are."""
        files = [file for commit in commits for file in commit.record.files]
        whole = not any(file.path in self._fetcher.lost for file in files)
        return whole and len(commits) < _NEAR and sum(file.size for file in files) * 2 <= run.nbytes


def _gone(problem: NotFound | CorruptDelta) -> WeightwireError:
    if isinstance(problem, CorruptDelta):
        return problem
    return DataGone(f"{problem.message}, and no anchor leads past it", hint="publish a new anchor, or a new run")
