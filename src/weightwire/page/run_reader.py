"""What the page knows of a run, read from its bucket a little at a time.

A reader remembers what it has read: a look asks only for what is new, a few requests at a time. It reads records and
the headers of deltas, and writes nothing; whatever cannot be read is left out, unless it is the chain itself.
"""

from __future__ import annotations

import re
from typing import TypeVar

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.chain import (
    DELTA,
    RUN,
    ChainReader,
    Commit,
    DataFile,
    Epoch,
    Gc,
    Heartbeat,
    Record,
    Run,
    Sealed,
    Shortcut,
    commit_path,
    epoch_path,
    gc_path,
    heartbeat_path,
    read_run,
)
from weightwire.delta import Delta
from weightwire.errors import (
    BrokenChain,
    BucketError,
    CorruptDelta,
    NoBucket,
    NoRun,
    NotFound,
    PermissionDenied,
    RunError,
    Unavailable,
    UnsupportedFormat,
)
from weightwire.page.layers import Row, rows_of
from weightwire.page.run_view import (
    AnchorView,
    History,
    ReplicaView,
    RunView,
    anchor_of,
    column_of,
    heat_of,
    history_of,
    picture_of,
    replica_of,
    sampled,
)
from weightwire.system import Runtime
from weightwire.weights import LENGTH_SIZE, read_size

__all__ = ["RunReader"]

_LANES = 16
_VERSIONS = 2000  # the newest; more would be no picture
_REPLICAS = 24
_SELDOM = 10.0  # seconds between looks at what changes seldom: anchors, retention, the publisher
_GUESS = 32 << 10  # bytes of a delta that nearly always hold its header
_LARGEST = 16 << 20  # a header that is worth reading
_NO_LISTS = "This key may not list the bucket, so replicas and anchors are not shown."

_SHORTCUT = re.compile(r"shortcuts/([0-9]{1,15})/[a-z]+-[0-9a-f]{16}\.json")
_NUMBERED = re.compile(r"(?:epochs|gc)/([0-9]{8,20})\.json")

AnyRecord = TypeVar("AnyRecord", bound=Record)


class RunReader:
    """`look` returns the picture as it is now, or raises what keeps it from seeing it; what it knew stays known."""

    def __init__(self, bucket: Bucket, runtime: Runtime) -> None:
        self._bucket, self._runtime = bucket, runtime
        self._run: ObjectInfo | None = None  # the last that was there
        self._known: _Known | None = None

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
            self._known, self._run = _Known(ChainReader(self._bucket, run), run, self._runtime), found
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


class _Known:
    """What is known of one run."""

    def __init__(self, chain: ChainReader, run: Run, runtime: Runtime) -> None:
        self._chain, self._bucket, self._runtime = chain, chain.bucket, runtime
        self._run = run
        self._rows: tuple[Row, ...] = rows_of(run.tensors)
        self._head: Sealed[Commit] | None = None
        self._commits: list[Commit] = []
        self._columns: dict[int, tuple[float, ...] | None] = {}
        self._beats: dict[str, tuple[ObjectInfo, Heartbeat | None]] = {}
        self._histories: dict[str, History] = {}
        self._shortcuts: dict[str, Shortcut | None] = {}
        self._data: set[str] = set()  # the files of anchors
        self._gc: Gc | None = None
        self._publisher: Epoch | None = None
        self._listed: float | None = None  # when what changes seldom was listed
        self._may_list = True

    async def look(self) -> RunView:
        await self._read_commits()
        await self._read_seldom()
        await self._read_columns()
        replicas, unshown = await self._read_replicas()
        return picture_of(
            self._bucket.url,
            self._runtime.time(),
            self._run,
            self._commits,
            publisher=self._publisher,
            anchors=self._anchors(),
            below=self._gc.below if self._gc else 0,
            replicas=sorted(replicas, key=lambda one: one.name),
            unshown=unshown,
            heat=heat_of(self._commits, self._rows, self._columns),
            notes=() if self._may_list else (_NO_LISTS,),
        )

    # --- the chain -----------------------------------------------------------------------------------------------

    async def _read_commits(self) -> None:
        if self._head is None:
            await self._read_newest()
        while self._head is not None and (more := await self._chain.read_after(self._head)):
            self._head = more[-1]
            self._commits += [one.record for one in more]
        del self._commits[:-_VERSIONS]

    async def _read_newest(self) -> None:
        """The newest commits; each must be the one that the next was built on."""
        head = await self._chain.read_head()
        if head is None:
            return
        found = {head.record.version: head}

        async def read(version: int) -> None:
            commit = await self._chain.read(version)
            if commit is None:
                raise BrokenChain(
                    f"{self._chain.where(commit_path(version))}: is missing, though later versions are there",
                    hint="`weightwire verify` finds out how far the chain is whole",
                )
            found[version] = commit

        versions = range(max(0, head.record.version - _VERSIONS + 1), head.record.version + 1)
        await each(versions[:-1], _LANES, read)
        for version in versions[:-1]:
            self._chain.check_follows(found[version], found[version + 1])
        self._head, self._commits = head, [found[version].record for version in versions]

    # --- what changes seldom -------------------------------------------------------------------------------------

    async def _read_seldom(self) -> None:
        now = self._runtime.clock()
        if self._listed is not None and now - self._listed < _SELDOM:
            return
        self._may_list = True
        paths = [one.path for one in await self._list("shortcuts/")]
        first = self._commits[0].version if self._commits else 0
        wanted = [path for path in paths if (made := _SHORTCUT.fullmatch(path)) and int(made[1]) >= first]

        async def read(path: str) -> None:
            self._shortcuts[path] = await self._chain.read_shortcut(path)

        await each([path for path in wanted if path not in self._shortcuts], _LANES, read)
        self._shortcuts = {path: self._shortcuts[path] for path in wanted}
        self._data = {one.path for one in await self._list("anchors/")}
        self._gc = await self._last("gc/", Gc) or self._gc
        self._publisher = await self._last("epochs/", Epoch) or self._publisher
        self._listed = now

    def _anchors(self) -> list[AnchorView]:
        """Those that lead where the chain leads: anyone who may write may have put one there."""
        states = {commit.version: commit.after for commit in self._commits}
        ways = [one for one in self._shortcuts.values() if one is not None and states.get(one.version) == one.after]
        return [anchor_of(one, all(file.path in self._data for file in one.files)) for one in ways]

    async def _last(self, folder: str, kind: type[AnyRecord]) -> AnyRecord | None:
        """The record with the highest number that is one."""
        paths = [one.path for one in await self._list(folder) if _NUMBERED.fullmatch(one.path)]
        for path in sorted(paths, reverse=True):
            record = await self._read(path, kind)
            if isinstance(record, Epoch) and epoch_path(record.epoch) == path:
                return record
            if isinstance(record, Gc) and gc_path(record.below) == path:
                return record
        return None

    # --- replicas ------------------------------------------------------------------------------------------------

    async def _read_replicas(self) -> tuple[list[ReplicaView], int]:
        """Those that were heard of last, and how many others there are; of them nothing is read."""
        listed = sorted(await self._list("replicas/"), key=lambda one: -one.modified)
        newest = listed[:_REPLICAS]

        async def read(one: ObjectInfo) -> None:
            beat = await self._read(one.path, Heartbeat)
            if beat is not None and heartbeat_path(beat.name) != one.path:
                beat = None
            if beat is not None:
                self._histories[one.path] = history_of(self._histories.get(one.path, {}), beat)
            self._beats[one.path] = one, beat

        known = self._beats
        await each([one for one in newest if one.path not in known or known[one.path][0] != one], _LANES, read)
        # One that is there but not shown may be again: what it went through stays known.
        there = {one.path for one in listed}
        self._beats = {path: beat for path, beat in self._beats.items() if path in there}
        self._histories = {path: history for path, history in self._histories.items() if path in there}
        found = [self._beats[one.path] for one in newest]
        shown = [replica_of(beat, one.modified, self._histories[one.path]) for one, beat in found if beat is not None]
        return shown, len(listed) - len(newest)

    # --- headers of deltas ---------------------------------------------------------------------------------------

    async def _read_columns(self) -> None:
        """A delta that is gone, or cannot be read, has none: that is for `weightwire verify` to judge."""
        _, versions = sampled(self._commits)
        commits = {commit.version: commit for commit in self._commits}

        async def read(version: int) -> None:
            try:
                self._columns[version] = column_of(self._rows, await self._changed(commits[version]))
            except (NoBucket, Unavailable):
                raise
            except (BucketError, CorruptDelta, UnsupportedFormat):
                self._columns[version] = None

        wanted = [one for one in versions if commits[one].kind == DELTA]
        await each([one for one in wanted if one not in self._columns], _LANES, read)
        self._columns = {one: self._columns[one] for one in wanted}

    async def _changed(self, commit: Commit) -> dict[str, int]:
        """The changed weights of each tensor, added up over the files of all ranks."""
        changed: dict[str, int] = {}
        for file in commit.files:
            delta = await self._header(file)
            for name, entry in delta.entries.items():
                changed[name] = changed.get(name, 0) + entry.changed
        return changed

    async def _header(self, file: DataFile) -> Delta:
        where = self._chain.where(file.path)
        head = await self._bytes(file, 0, min(file.size, _GUESS))
        size = read_size(head[:LENGTH_SIZE], where, total=file.size, error=CorruptDelta)
        if size > _LARGEST:
            raise CorruptDelta(f"{where}: has a header of {size:,} bytes")
        if size > len(head):
            head += await self._bytes(file, len(head), size)
        return Delta.remote(lambda begin, end: head[begin:end], file.size, where)

    async def _bytes(self, file: DataFile, begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        await self._bucket.read_into(file.path, memoryview(buffer), begin)
        return bytes(buffer)

    # --- objects -------------------------------------------------------------------------------------------------

    async def _list(self, folder: str) -> list[ObjectInfo]:
        try:
            return list(await self._bucket.list(folder))
        except PermissionDenied:
            self._may_list = False
            return []

    async def _read(self, path: str, kind: type[AnyRecord]) -> AnyRecord | None:
        """A record of this run, if it is one that we can read."""
        try:
            return self._chain.unseal(await self._bucket.get(path), kind, path).record
        except (NotFound, PermissionDenied, RunError, UnsupportedFormat):
            return None
