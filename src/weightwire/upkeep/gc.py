"""Garbage collection: deletes the data of versions that nobody needs any more.

`retention` has the rules; this looks at the bucket, asks them, and deletes. Time is the store's: no other clock decides
anything. Knows records and paths; reads no weights. Never touches commits, epochs, run.json, side files and gc records,
nor anything of a version that is not committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.chain import (
    ChainReader,
    Commit,
    Folder,
    Gc,
    Heartbeat,
    Record,
    Shortcut,
    commit_path,
    gc_path,
    missing_commit,
    number_of,
    read_run,
    replica_name_of,
    seal,
    version_of,
)
from weightwire.errors import (
    AlreadyExists,
    BrokenChain,
    BucketError,
    ForeignRun,
    NotFound,
    PermissionDenied,
    RunError,
    UnsupportedFormat,
)
from weightwire.system import Runtime
from weightwire.upkeep.retention import (
    DAY,
    Announced,
    Lease,
    Limit,
    Removal,
    Retention,
    are_enough,
    due,
    first_young,
    holds_all,
    is_there,
    limits,
    newest,
    orphans,
    settled,
)

__all__ = ["Sweep", "sweep"]

AnyRecord = TypeVar("AnyRecord", bound=Record)
_Versioned = tuple[int, Removal]  # with the version that the object belongs to

_AT_ONCE = 16  # requests at the same time
_WINDOW = 64  # commits held at the same time
_MOST_HOLES = 16  # that a listing leaves, of commits made meanwhile


@dataclass(frozen=True)
class Sweep:
    """What a sweep has found and done; in a dry run, what it would have done. Times are the store's."""

    run: str
    head: int
    below: int  # data below this version may go
    limits: tuple[Limit, ...]  # what keeps it from being higher, the lowest first
    anchors: tuple[int, ...]  # that are kept, the oldest first
    leases: tuple[Lease, ...]  # that are alive
    removed: tuple[Removal, ...]
    waiting: tuple[Removal, ...]
    now: float
    dry_run: bool

    @property
    def nbytes(self) -> int:
        return sum(one.size for one in self.removed)


@dataclass
class _View:
    """The bucket, as far as retention is concerned."""

    now: float = 0.0
    commits: dict[int, float] = field(default_factory=dict)  # version -> when it was committed
    data: dict[int, list[ObjectInfo]] = field(default_factory=dict)
    shortcut_objects: dict[int, list[ObjectInfo]] = field(default_factory=dict)
    shortcuts: dict[int, list[Shortcut]] = field(default_factory=dict)
    unclear: set[int] = field(default_factory=set)  # versions with a shortcut that we cannot read
    heartbeats: dict[str, ObjectInfo] = field(default_factory=dict)  # by the name of the replica
    leases: list[Lease] = field(default_factory=list)
    probes: Sequence[ObjectInfo] = ()
    records: list[Announced] = field(default_factory=list)

    @property
    def head(self) -> int:
        return max(self.commits, default=-1)

    @property
    def sizes(self) -> dict[str, int]:
        return {one.path: one.size for objects in self.data.values() for one in objects}


async def sweep(bucket: Bucket, runtime: Runtime, retention: Retention, *, dry_run: bool = False) -> Sweep:
    """Deletes what nobody needs any more. May be killed anywhere, and run by several at the same time.

    Data goes in two steps: a gc record says that it may, and only when that is older than the grace period does a sweep
    delete it. A dry run writes nothing, so it takes the newest object for the present time: it may list less than goes.
    """
    run = await read_run(bucket)
    chain = ChainReader(bucket, run)
    view = await _look(bucket, runtime, chain, retention, dry_run)
    anchors, strays = await _examine(chain, view, retention)
    holding = limits(retention, view.now, anchors, view.leases, view.commits)
    bound = holding[0].version
    if bound > max((record.below for record in view.records), default=0):
        if not dry_run:
            with suppress(AlreadyExists):  # another sweep says the same
                await bucket.create(gc_path(bound), seal(Gc(run=run.run, below=bound, time=runtime.time())).data)
        view.records.append(Announced(bound, view.now))
    gone = min(bound, settled(view.records, view.now, retention.grace))
    steps = [
        [one for _, one in _of_versions(view.shortcut_objects, 0, gone)],  # first: what they lead to is about to go
        [one for _, one in _of_versions(view.data, 0, gone)],
        [one for version, one in strays if version >= gone] + _leftovers(view.probes, view.now),
        _forgotten(view, retention),
    ]
    if not dry_run:
        await _delete(bucket, steps, view.heartbeats.values())
    return Sweep(
        run=run.run,
        head=view.head,
        below=bound,
        limits=tuple(holding),
        anchors=tuple(newest(anchors, retention)),
        leases=tuple(lease for lease in view.leases if lease.is_alive(view.now)),
        removed=tuple(one for step in steps for one in step),
        waiting=tuple(_waiting(view, gone, bound, retention.grace, strays)),
        now=view.now,
        dry_run=dry_run,
    )


async def _delete(bucket: Bucket, steps: Iterable[Sequence[Removal]], heartbeats: Iterable[ObjectInfo]) -> None:
    """One step after the other."""
    known = {one.path: one for one in heartbeats}

    async def delete(one: Removal) -> None:
        if one.path in known:
            found = await bucket.find(one.path)
            if found is None or found.modified > known[one.path].modified + 1:  # stores round it in one of the two
                return  # the replica has come back just now
        await bucket.delete(one.path)

    for step in steps:
        await each(step, _AT_ONCE, delete)


def _of_versions(objects: Mapping[int, Sequence[ObjectInfo]], begin: int, end: int) -> list[_Versioned]:
    return [
        (version, Removal(one.path, one.size, f"below version {end}"))
        for version in sorted(objects)
        if begin <= version < end
        for one in objects[version]
    ]


def _waiting(view: _View, begin: int, end: int, grace: float, strays: Iterable[_Versioned]) -> list[Removal]:
    """What goes when its grace period is over, and no sooner."""
    stray = {one.path for _, one in strays}
    return [
        replace(one, due=due(view.records, version, grace))
        for objects in (view.shortcut_objects, view.data)
        for version, one in _of_versions(objects, begin, end)
        if one.path not in stray
    ]


def _leftovers(probes: Iterable[ObjectInfo], now: float) -> list[Removal]:
    return [Removal(one.path, one.size, "a probe that was left") for one in probes if now - one.modified >= DAY]


def _forgotten(view: _View, retention: Retention) -> list[Removal]:
    alive = {lease.name for lease in view.leases if lease.is_alive(view.now)}
    return [
        Removal(one.path, one.size, "a replica that has not been heard of")
        for name, one in view.heartbeats.items()
        if view.now - one.modified >= retention.forgotten and name not in alive
    ]


# --- what there is -----------------------------------------------------------------------------------------------


async def _look(bucket: Bucket, runtime: Runtime, chain: ChainReader, retention: Retention, dry_run: bool) -> _View:
    """In an order that fits what goes on meanwhile: data is there before its commit, a shortcut after its data.

    The time comes first: so everything looks younger than it is, and never older.
    """
    view = _View()
    now = None if dry_run else await _store_time(bucket, runtime)
    listed = [await bucket.list(folder) for folder in (Folder.COMMITS, Folder.DELTAS, Folder.ANCHORS)]
    listed += [await bucket.list(folder) for folder in (Folder.SHORTCUTS, Folder.REPLICAS, Folder.GC)]
    view.probes = await bucket.list(Folder.PROBE)
    commits, deltas, anchors, shortcuts, replicas, records = listed
    newest = max((one.modified for objects in (*listed, view.probes) for one in objects), default=0.0)
    view.now = newest if now is None else now
    view.commits = await _without_holes(chain, commits)
    view.data = _by_version([*deltas, *anchors])
    view.shortcut_objects = _by_version(shortcuts)
    await _read_shortcuts(chain, view)
    view.heartbeats = {name: one for one in replicas if (name := replica_name_of(one.path)) is not None}
    await _read_leases(chain, view, retention)
    announced = [one for one in records if (number := number_of(one.path)) is None or number <= view.head]
    view.records = await _read_records(chain, announced, view.now, retention.grace)
    return view


async def _store_time(bucket: Bucket, runtime: Runtime) -> float | None:
    """What the store's clock says; None to those who may not write."""
    path = f"{Folder.PROBE}{runtime.token()}"
    try:
        await bucket.put(path, b"what time is it?")
        found = await bucket.find(path)
    except PermissionDenied:
        return None
    finally:
        with suppress(BucketError):
            await bucket.delete(path)
    return found.modified if found else None


def _by_version(objects: Iterable[ObjectInfo]) -> dict[int, list[ObjectInfo]]:
    found: dict[int, list[ObjectInfo]] = defaultdict(list)
    for one in objects:
        version = version_of(one.path)
        if version is not None:
            found[version].append(one)
    return dict(found)


async def _without_holes(chain: ChainReader, objects: Iterable[ObjectInfo]) -> dict[int, float]:
    """When each version was committed. A listing may miss what came meanwhile; where one is really missing, nothing may
    be deleted."""
    found = {number: one.modified for one in objects if (number := number_of(one.path)) is not None}
    for _ in range(_MOST_HOLES):
        version = _first_hole(found)
        one = None if version is None else await chain.bucket.find(commit_path(version))
        if version is None or one is None:
            break
        found[version] = one.modified
    if (version := _first_hole(found)) is not None:
        raise missing_commit(chain.where(commit_path(version)), "; nothing was deleted")
    return found


def _first_hole(commits: Mapping[int, float]) -> int | None:
    if len(commits) == max(commits, default=-1) + 1:
        return None
    return next(version for version in count() if version not in commits)


async def _read(chain: ChainReader, one: ObjectInfo, kind: type[AnyRecord]) -> AnyRecord | None:
    """A record of this run; None if it is gone."""
    try:
        data = await chain.bucket.get(one.path)
    except NotFound:
        return None
    return chain.unseal(data, kind, one.path).record


async def _read_shortcuts(chain: ChainReader, view: _View) -> None:
    async def read(found: tuple[int, ObjectInfo]) -> None:
        version, one = found
        shortcut = await chain.read_shortcut(one.path)
        if shortcut is None:
            view.unclear.add(version)  # of a newer release, maybe: who knows what it names
        else:
            view.shortcuts.setdefault(shortcut.version, []).append(shortcut)

    await each([(version, one) for version, found in view.shortcut_objects.items() for one in found], _AT_ONCE, read)


async def _read_leases(chain: ChainReader, view: _View, retention: Retention) -> None:
    async def read(named: tuple[str, ObjectInfo]) -> None:
        name, one = named
        try:
            beat = await _read(chain, one, Heartbeat)
        except ForeignRun:
            return
        except (RunError, UnsupportedFormat):
            if view.now - one.modified < DAY:
                raise  # a replica that needs we do not know what
            return
        if beat is not None:
            held = min(beat.version, view.head)
            view.leases.append(Lease(name, held, beat.alive_until(one.modified)))

    await each(view.heartbeats.items(), _AT_ONCE, read)
    view.leases.sort(key=lambda lease: lease.name)


async def _read_records(chain: ChainReader, objects: Iterable[ObjectInfo], now: float, grace: float) -> list[Announced]:
    """The newest gc records, down to one that is old enough: what is older than that says nothing new."""
    numbered = {number: one for one in objects if (number := number_of(one.path)) is not None}
    found: list[Announced] = []
    for number, one in sorted(numbered.items(), reverse=True):
        try:
            record = await _read(chain, one, Gc)
        except (RunError, UnsupportedFormat):
            continue  # it allows nothing
        if record is not None and record.below == number:
            found.append(Announced(number, one.modified))
            if now - one.modified >= grace:
                break
    return found


async def _examine(chain: ChainReader, view: _View, retention: Retention) -> tuple[list[int], list[_Versioned]]:
    """From the newest version down: anchors from which it can be reached, as many as matter; and orphans."""
    anchors: list[int] = []
    strays: list[_Versioned] = []
    sizes, reachable = view.sizes, True
    young = first_young(retention, view.now, view.commits)
    lowest = min(view.data, default=view.head + 1)
    for top in range(view.head, lowest - 1, -_WINDOW):
        searching = reachable and not are_enough(anchors, retention, young)
        versions = [v for v in range(top, max(lowest, top - _WINDOW + 1) - 1, -1) if searching or v in view.data]
        commits = await _read_commits(chain, versions)
        for version in versions:
            commit, shortcuts = commits[version], view.shortcuts.get(version, [])
            if reachable and not are_enough(anchors, retention, young) and holds_all(commit, shortcuts, sizes):
                anchors.append(version)
            reachable = reachable and is_there(commit.files, sizes)
            if version not in view.unclear:
                found = orphans(commit, shortcuts, view.data.get(version, []), view.now, retention)
                strays += [(version, one) for one in found]
    return anchors, strays


async def _read_commits(chain: ChainReader, versions: Iterable[int]) -> dict[int, Commit]:
    found: dict[int, Commit] = {}

    async def read(version: int) -> None:
        commit = await chain.read(version)
        if commit is None:
            raise BrokenChain(f"{chain.where(commit_path(version))}: is gone; nothing was deleted")
        found[version] = commit.record

    await each(versions, _AT_ONCE, read)
    return found
