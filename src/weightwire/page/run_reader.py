"""What the page knows of a run, read from its bucket a little at a time.

A reader remembers what it has read: a look asks only for what is new, a few requests at a time. It reads records and
the headers of deltas, and writes nothing; whatever cannot be read is left out, unless it is the chain itself.
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
    picture_of,
    replica_of,
)
from weightwire.system import Runtime

__all__ = ["RunReader"]

_AT_ONCE = 16
_VERSIONS = 2000  # the newest; more would be no picture
_REPLICAS = 24
_SELDOM = 10.0  # seconds between looks at what changes seldom: anchors, retention, the publisher
_NO_LISTS = "This key may not list the bucket, so replicas and anchors are not shown."


class RunReader:
    """`look` returns the picture as it is now, or raises what keeps it from seeing it; what it knew stays known."""

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket, self._runtime = bucket, runtime
        self._run: ObjectInfo | None = None  # the last that was there
        self._known: _KnownRun | None = None

    async def look(self) -> RunView:
        found = await self._find_run()
        if found is None and self._run is not None:
            raise NoRun(
                f"{self._bucket.url}: the run is no longer there",
                hint="check whether it was deleted; another one is shown as soon as it begins",
            )
        if found is None:
            return RunView(self._bucket.url, self._runtime.time())
        if self._known is None or found != self._run:  # another run may have taken its place
            run = await read_run(self._bucket)
            self._known, self._run = _KnownRun(self._bucket, run, self._runtime), found
        try:
            return await self._known.look()
        except RunError:
            self._known = None  # the bucket may have been put right, or emptied: from the start, the next time
            raise

    async def _find_run(self) -> ObjectInfo | None:
        """None where nothing has been published yet; a bucket that is not there is a mistake."""
        try:
            return await self._bucket.find(RUN)
        except NoBucket:
            raise
        except (NotFound, NoRun):
            return None


class _KnownRun:
    """What is known of one run."""

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
        return picture_of(
            self._url,
            self._runtime.time(),
            self._run,
            commits,
            publisher=self._beside.publisher,
            anchors=self._beside.anchors(commits),
            below=self._beside.gc.below if self._beside.gc else 0,
            replicas=sorted(replicas, key=lambda one: one.name),
            unshown=unshown,
            heat=heat,
            notes=() if self._lists.allowed else (_NO_LISTS,),
        )


class _Lists:
    """Listings of a bucket. A key without list permission gets empty ones, and `allowed` says so."""

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

    async def look(self) -> list[Commit]:
        if self._head is None:
            self._append(await self._chain.read_newest(_VERSIONS))
        while self._head is not None and (more := await self._chain.read_after(self._head)):
            self._append(more)
        del self._commits[:-_VERSIONS]
        return self._commits

    def _append(self, more: list[Sealed[Commit]]) -> None:
        self._head = more[-1] if more else None
        self._commits += [one.record for one in more]


class _Surroundings:
    """What lies beside the chain and changes seldom: anchors, retention, the publisher."""

    def __init__(self, chain: ChainReader, lists: _Lists, runtime: Runtime) -> None:
        self._chain, self._lists, self._runtime = chain, lists, runtime
        self._shortcuts: dict[str, Shortcut | None] = {}
        self._data: set[str] = set()  # the files of anchors
        self._listed: float | None = None  # when all this was listed
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
        wanted = [one.path for one in await self._lists.list(Folder.SHORTCUTS) if version_of(one.path) in shown]

        async def read(path: str) -> None:
            self._shortcuts[path] = await self._chain.read_shortcut(path)

        await each([path for path in wanted if path not in self._shortcuts], _AT_ONCE, read)
        self._shortcuts = {path: self._shortcuts[path] for path in wanted}

    def anchors(self, commits: list[Commit]) -> list[AnchorView]:
        """Those that lead where the chain leads: anyone who may write may have put one there."""
        states = {commit.version: commit.after for commit in commits}
        ways = [one for one in self._shortcuts.values() if one is not None and states.get(one.version) == one.after]
        return [anchor_of(one, all(file.path in self._data for file in one.files)) for one in ways]


class _KnownReplicas:
    """Heartbeats, and what each replica went through so far."""

    def __init__(self, chain: ChainReader, lists: _Lists) -> None:
        self._chain, self._lists = chain, lists
        self._beats: dict[str, tuple[ObjectInfo, Heartbeat | None]] = {}
        self._histories: dict[str, History] = {}

    async def look(self) -> tuple[list[ReplicaView], int]:
        """Those that were heard of last, and how many others there are; of them nothing is read."""
        listed = sorted(await self._lists.list(Folder.REPLICAS), key=lambda one: -one.modified)
        newest = listed[:_REPLICAS]
        known = self._beats
        await each([one for one in newest if one.path not in known or known[one.path][0] != one], _AT_ONCE, self._read)
        # One that is there but not shown may be again: what it went through stays known.
        there = {one.path for one in listed}
        self._beats = {path: beat for path, beat in self._beats.items() if path in there}
        self._histories = {path: history for path, history in self._histories.items() if path in there}
        found = [self._beats[one.path] for one in newest]
        shown = [replica_of(beat, one.modified, self._histories[one.path]) for one, beat in found if beat is not None]
        return shown, len(listed) - len(newest)

    async def _read(self, one: ObjectInfo) -> None:
        beat = await self._chain.read_heartbeat(one.path)
        if beat is not None:
            self._histories[one.path] = history_of(self._histories.get(one.path, {}), beat)
        self._beats[one.path] = one, beat
