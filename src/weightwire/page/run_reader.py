"""Reads a snapshot of a run from its bucket, incrementally.

A reader caches what it has read, so each look requests only what is new. It reads records and the headers of deltas,
and writes nothing. An unreadable record is left out, except for the chain itself: that is an error.
"""

from __future__ import annotations

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.chain import (
    RUN,
    ChainReader,
    Commit,
    Epoch,
    Folder,
    Gc,
    Heartbeat,
    Run,
    Sealed,
    Shortcut,
    is_run_missing,
    read_run,
    version_of,
)
from weightwire.errors import NoBucket, NoRun, NotFound, PermissionDenied, RunError
from weightwire.page.heat_reader import HeatReader
from weightwire.page.layers import rows_of
from weightwire.page.run_view import (
    AnchorView,
    History,
    ReplicaView,
    RunView,
    anchor_of,
    history_of,
    replica_of,
    snapshot_of,
)
from weightwire.system import Runtime

__all__ = ["RunReader"]

_AT_ONCE = 16
_VERSIONS = 2000  # the newest
_SHORTCUTS = 4000  # of these versions: the rest may be junk
_REPLICAS = 200  # those with the newest heartbeats
_SELDOM = 10.0  # seconds between reads of what changes rarely: anchors, retention, the publisher
_NO_LISTS = "This key has no list permission, so replicas and anchors are not shown."


class RunReader:
    """`look` returns the current snapshot. After an error, the next look continues with what is cached."""

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket, self._runtime = bucket, runtime
        self._run: ObjectInfo | None = None  # of the last look that found a run
        self._known: _KnownRun | None = None

    async def look(self) -> RunView:
        found = await self._find_run()
        if found is None and self._run is not None:
            raise NoRun(
                f"{self._bucket.url}: the run was deleted",
                hint="publish again: the page shows the new run when it starts",
            )
        if found is None:
            return RunView(self._bucket.url, self._runtime.time())
        if self._known is None or found != self._run:  # a new run may have replaced it
            run = await read_run(self._bucket)
            self._known, self._run = _KnownRun(self._bucket, run, self._runtime), found
        try:
            return await self._known.look()
        except RunError:
            self._known = None  # the bucket may be repaired or emptied: the next look starts over
            raise

    async def _find_run(self) -> ObjectInfo | None:
        """None if nothing has been published yet. A missing bucket is an error."""
        try:
            return await self._bucket.find(RUN)
        except NoBucket:
            raise
        except (NotFound, NoRun):
            return None
        except PermissionDenied:
            if not await is_run_missing(self._bucket):
                raise
            return None


class _KnownRun:
    """The cached parts of one run."""

    def __init__(self, bucket: Bucket, run: Run, runtime: Runtime) -> None:
        chain, self._lists = ChainReader(bucket, run), _Lists(bucket)
        self._run, self._url, self._runtime = run, bucket.url, runtime
        self._chain = _KnownChain(chain)
        self._beside = _Surroundings(chain, self._lists, runtime)
        self._heat = HeatReader(chain, rows_of(run.tensors))
        self._replicas = _KnownReplicas(chain, self._lists)

    async def look(self) -> RunView:
        commits = await self._chain.look()
        await self._beside.look(commits)
        heat = await self._heat.look(commits)
        replicas, unshown = await self._replicas.look()
        return snapshot_of(
            self._url,
            self._runtime.time(),
            self._run,
            commits,
            publisher=self._beside.publisher,
            keys=self._chain.keys,
            anchors=self._beside.anchors(commits),
            below=self._beside.gc.below if self._beside.gc else 0,
            replicas=sorted(replicas, key=lambda one: one.name),
            unshown=unshown,
            heat=heat,
            notes=() if self._lists.allowed else (_NO_LISTS,),
        )


class _Lists:
    """Listings of a bucket. Without list permission they are empty, and `allowed` is False."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.allowed = True

    async def list(self, folder: str) -> list[ObjectInfo]:
        try:
            return list(await self._bucket.list(folder))
        except PermissionDenied:
            self.allowed = False
            return []


class _KnownChain:
    """The newest commits."""

    def __init__(self, chain: ChainReader) -> None:
        self._chain = chain
        self._head: Sealed[Commit] | None = None
        self._commits: list[Commit] = []
        self.keys: frozenset[str] = frozenset()  # that may sign the next version

    async def look(self) -> list[Commit]:
        if self._head is None:
            await self._append(await self._chain.read_newest(_VERSIONS))
        while self._head is not None and (more := await self._chain.read_after(self._head)):
            await self._append(more)
        del self._commits[:-_VERSIONS]
        return self._commits

    async def _append(self, more: list[Sealed[Commit]]) -> None:
        head = more[-1] if more else None
        if self._head is None or any(one.record.keys for one in more):
            self.keys = await self._chain.keys_after(head)
        self._head = head
        self._commits += [one.record for one in more]


class _Surroundings:
    """What changes rarely: anchors beside the chain, retention, the publisher."""

    def __init__(self, chain: ChainReader, lists: _Lists, runtime: Runtime) -> None:
        self._chain, self._lists, self._runtime = chain, lists, runtime
        self._shortcuts: dict[str, Shortcut | None] = {}
        self._data: set[str] = set()  # the files of anchors
        self._listed: float | None = None  # the time of the last listing
        self.gc: Gc | None = None
        self.publisher: Epoch | None = None

    async def look(self, commits: list[Commit]) -> None:
        now = self._runtime.clock()
        if self._listed is not None and now - self._listed < _SELDOM:
            return
        self._lists.allowed = True
        await self._read_shortcuts(range(commits[0].version, commits[-1].version + 1) if commits else range(0))
        self._data = {one.path for one in await self._lists.list(Folder.ANCHORS)}
        self.gc = await self._chain.newest_gc(await self._lists.list(Folder.GC)) or self.gc
        self.publisher = await self._chain.newest_epoch(await self._lists.list(Folder.EPOCHS)) or self.publisher
        self._listed = now

    async def _read_shortcuts(self, shown: range) -> None:
        listed = await self._lists.list(Folder.SHORTCUTS)
        wanted = [one.path for one in listed if version_of(one.path) in shown][:_SHORTCUTS]

        async def read(path: str) -> None:
            self._shortcuts[path] = await self._chain.read_shortcut(path)

        await each([path for path in wanted if path not in self._shortcuts], _AT_ONCE, read)
        self._shortcuts = {path: self._shortcuts[path] for path in wanted}

    def anchors(self, commits: list[Commit]) -> list[AnchorView]:
        """The anchors whose state matches the chain. Anyone with write permission could have added others."""
        states = {commit.version: commit.after for commit in commits}
        ways = [one for one in self._shortcuts.values() if one is not None and states.get(one.version) == one.after]
        return [anchor_of(one, all(file.path in self._data for file in one.files)) for one in ways]


class _KnownReplicas:
    """The heartbeats and the history of each replica."""

    def __init__(self, chain: ChainReader, lists: _Lists) -> None:
        self._chain, self._lists = chain, lists
        self._beats: dict[str, tuple[ObjectInfo, Heartbeat | None]] = {}
        self._histories: dict[str, History] = {}

    async def look(self) -> tuple[list[ReplicaView], int]:
        """The replicas with the newest heartbeats, and the number of others, which are not read."""
        listed = sorted(await self._lists.list(Folder.REPLICAS), key=lambda one: -one.modified)
        newest = listed[:_REPLICAS]
        known = self._beats
        await each([one for one in newest if one.path not in known or known[one.path][0] != one], _AT_ONCE, self._read)
        # A replica that is not shown now may be shown later, so keep its history.
        there = {one.path for one in listed}
        self._beats = {path: beat for path, beat in self._beats.items() if path in there}
        self._histories = {path: history for path, history in self._histories.items() if path in there}
        found = [self._beats[one.path] for one in newest]
        shown = [
            replica_of(beat, one.modified, self._histories[one.path], among=len(found))
            for one, beat in found
            if beat is not None
        ]
        return shown, len(listed) - len(newest)

    async def _read(self, one: ObjectInfo) -> None:
        beat = await self._chain.read_heartbeat(one.path)
        if beat is not None:
            self._histories[one.path] = history_of(self._histories.get(one.path, {}), beat)
        self._beats[one.path] = one, beat
