"""Garbage collection: deletes the data of versions that are no longer needed, by the rules of `retention`.

All times are the store's. Reads records and listings, and before it deletes data of versions, the anchors that are to
replace it. Never deletes commits, epochs, run.json, side files
or gc records, nor data of a version that is not committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

from weightwire.bucket import Bucket, ObjectInfo, each, is_probe
from weightwire.chain import (
    ChainReader,
    Commit,
    Folder,
    Gc,
    Heartbeat,
    Record,
    Shortcut,
    Trust,
    commit_path,
    find_or_list,
    gc_path,
    get_record,
    missing_commit,
    number_of,
    read_run,
    replica_name_of,
    seal,
    unlisted_means_missing,
    version_of,
)
from weightwire.errors import (
    AlreadyExists,
    BucketError,
    ForeignRun,
    NotFound,
    PermissionDenied,
    RunError,
    UnsupportedFormat,
)
from weightwire.system import Runtime
from weightwire.upkeep.anchor_check import AnchorCheck, Damage, VerifiedFiles
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
    relied_on,
    settled,
)

__all__ = ["Sweep", "sweep"]

AnyRecord = TypeVar("AnyRecord", bound=Record)
_Versioned = tuple[int, Removal]  # an object's version, and its removal

_AT_ONCE = 16  # requests at the same time
_WINDOW = 64  # commits in memory at the same time
_MOST_HOLES = 16  # commits that a listing may miss because they were created meanwhile


@dataclass(frozen=True)
class Sweep:
    """What a sweep found and deleted; in a dry run, what it would delete. Times are the store's."""

    run: str
    head: int
    below: int  # data below this version can be deleted
    limits: tuple[Limit, ...]  # why it is not higher, the lowest first
    anchors: tuple[int, ...]  # kept, the oldest first
    leases: tuple[Lease, ...]  # of replicas that are alive
    removed: tuple[Removal, ...]
    waiting: tuple[Removal, ...]
    damaged: tuple[Damage, ...]  # files of anchors that do not count
    now: float
    dry_run: bool

    @property
    def nbytes(self) -> int:
        return sum(one.size for one in self.removed)


@dataclass
class _View:
    """The objects of the bucket that retention deals with."""

    now: float = 0.0
    commits: dict[int, float] = field(default_factory=dict)  # version -> commit time
    data: dict[int, list[ObjectInfo]] = field(default_factory=dict)
    shortcut_objects: dict[int, list[ObjectInfo]] = field(default_factory=dict)
    shortcuts: dict[int, list[Shortcut]] = field(default_factory=dict)
    unclear: set[int] = field(default_factory=set)  # versions with an unreadable shortcut
    heartbeats: dict[str, ObjectInfo] = field(default_factory=dict)  # by replica name
    leases: list[Lease] = field(default_factory=list)
    probes: Sequence[ObjectInfo] = ()
    records: list[Announced] = field(default_factory=list)

    @property
    def head(self) -> int:
        return max(self.commits, default=-1)


@dataclass(frozen=True)
class _SweepPlan:
    """What a sweep does: announces `bound` if that is new, and deletes `steps` one after the other."""

    anchors: tuple[int, ...]
    limits: tuple[Limit, ...]
    steps: tuple[list[Removal], ...]
    waiting: tuple[Removal, ...]
    announces: bool

    @property
    def bound(self) -> int:
        return self.limits[0].version

    @property
    def needs_anchors(self) -> bool:
        """Whether it deletes data of versions, which anchors must be able to replace."""
        return any(self.steps[:2])


async def sweep(
    bucket: Bucket,
    runtime: Runtime,
    retention: Retention,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    verified: VerifiedFiles | None = None,
) -> Sweep:
    """Deletes data that nothing needs any longer. Safe to kill at any point, and to run several times at once.

    Deletion takes two steps: a gc record announces it, and a sweep after the grace period deletes. A dry run writes
    nothing, so it uses the time of the newest object as the current time. It may list less than a real sweep deletes.
    Pass the same `verified` to every sweep of a process, and no anchor is read twice.
    """
    run = await read_run(bucket)
    # In a signed run, an anchor that no key in force signed is of no use to followers with trusted keys.
    chain = ChainReader(bucket, run, Trust(frozenset(run.keys)) if run.keys else None)
    known = set() if verified is None else verified
    while True:
        keys = await _keys_in_force(chain)
        view = await _look(bucket, runtime, chain, retention, dry_run)
        objects = (one for found in view.data.values() for one in found)
        check = AnchorCheck(chain, runtime, objects, known)
        plan = await _plan_safely(chain, view, retention, check)
        # Reading anchors may take hours. Those of a key that was revoked meanwhile justify nothing.
        if not plan.needs_anchors or keys == await _keys_in_force(chain):
            break
    if not dry_run:
        if plan.announces:
            with suppress(AlreadyExists):  # another sweep announced the same
                record = Gc(run=run.run, below=plan.bound, time=runtime.time())
                await bucket.create(gc_path(plan.bound), seal(record).data)
        await _delete(bucket, plan.steps, view.heartbeats.values(), progress)
    return Sweep(
        run=run.run,
        head=view.head,
        below=plan.bound,
        limits=plan.limits,
        anchors=tuple(newest(plan.anchors, retention)),
        leases=tuple(lease for lease in view.leases if lease.is_alive(view.now)),
        removed=tuple(one for step in plan.steps for one in step),
        waiting=plan.waiting,
        damaged=tuple(check.damaged.values()),
        now=view.now,
        dry_run=dry_run,
    )


async def _keys_in_force(chain: ChainReader) -> frozenset[str]:
    return await chain.keys_after(await chain.read_head()) if chain.run.keys else frozenset()


async def _plan_safely(chain: ChainReader, view: _View, retention: Retention, check: AnchorCheck) -> _SweepPlan:
    """A plan whose anchors were read and are intact, if it deletes data of versions.

    Listings show only names and sizes, and anyone with write access may have put junk there.
    """
    while True:
        anchors, strays = await _examine(chain, view, retention, check.sizes)
        plan = _make_plan(view, retention, anchors, strays, _replaceable(check, anchors, retention))
        if not plan.needs_anchors and not check.damaged:
            return plan
        known = len(check.damaged)
        for version in sorted(relied_on(retention, view.now, anchors, view.commits), reverse=True):
            if not await check.is_intact(version, view.shortcuts.get(version, [])):
                break
        else:
            return plan
        if check.is_over or len(check.damaged) == known:
            return _make_plan(view, retention, [], strays)


def _replaceable(check: AnchorCheck, anchors: Sequence[int], retention: Retention) -> tuple[Limit, ...]:
    """Damaged anchors stay until there are enough intact ones: perhaps only the reading failed."""
    versions = [version for path in check.damaged if (version := version_of(path)) is not None]
    if not versions or len(anchors) >= retention.anchors:
        return ()
    return (Limit(min(versions), "damaged anchor, and too few others are intact"),)


def _make_plan(
    view: _View,
    retention: Retention,
    anchors: Sequence[int],
    strays: Sequence[_Versioned],
    more_limits: Iterable[Limit] = (),
) -> _SweepPlan:
    holding = limits(retention, view.now, anchors, view.leases, view.commits, more_limits)
    bound, records = holding[0].version, list(view.records)
    announces = bound > max((record.below for record in records), default=0)
    if announces:
        records.append(Announced(bound, view.now))
    gone = min(bound, settled(records, view.now, retention.grace))
    steps = (
        [one for _, one in _of_versions(view.shortcut_objects, 0, gone)],  # before the data that they lead to
        [one for _, one in _of_versions(view.data, 0, gone)],
        [one for version, one in strays if version >= gone] + _leftovers(view.probes, view.now),
        _forgotten(view, retention),
    )
    waiting = tuple(_waiting(view, records, gone, bound, retention.grace, strays))
    return _SweepPlan(tuple(anchors), tuple(holding), steps, waiting, announces)


async def _delete(
    bucket: Bucket,
    steps: Sequence[Sequence[Removal]],
    heartbeats: Iterable[ObjectInfo],
    progress: Callable[[int, int], None],
) -> None:
    """Deletes in steps: shortcuts must be gone before their data. `progress` receives objects deleted, of how many."""
    known = {one.path: one for one in heartbeats}
    deleted, total = 0, sum(map(len, steps))

    async def delete(one: Removal) -> None:
        if one.path in known:
            found = await find_or_list(bucket, one.path)
            if found is None or found.modified > known[one.path].modified + 1:  # stores round one of the two
                return  # the replica is back
        await bucket.delete(one.path)
        nonlocal deleted
        deleted += 1
        progress(deleted, total)

    for step in steps:
        await each(step, _AT_ONCE, delete)


def _of_versions(objects: Mapping[int, Sequence[ObjectInfo]], begin: int, end: int) -> list[_Versioned]:
    return [
        (version, Removal(one.path, one.size, f"below version {end}"))
        for version in sorted(objects)
        if begin <= version < end
        for one in objects[version]
    ]


def _waiting(
    view: _View, records: Sequence[Announced], begin: int, end: int, grace: float, strays: Iterable[_Versioned]
) -> list[Removal]:
    """Data that is announced, and deleted after its grace period."""
    stray = {one.path for _, one in strays}
    return [
        replace(one, due=due(records, version, grace))
        for objects in (view.shortcut_objects, view.data)
        for version, one in _of_versions(objects, begin, end)
        if one.path not in stray
    ]


def _leftovers(probes: Iterable[ObjectInfo], now: float) -> list[Removal]:
    old = (one for one in probes if is_probe(one.path) and now - one.modified >= DAY)
    return [Removal(one.path, one.size, "left by a probe") for one in old]


def _forgotten(view: _View, retention: Retention) -> list[Removal]:
    alive = {lease.name for lease in view.leases if lease.is_alive(view.now)}
    return [
        Removal(one.path, one.size, "heartbeat of a silent replica")
        for name, one in view.heartbeats.items()
        if view.now - one.modified >= retention.forgotten and name not in alive
    ]


# --- reading the bucket -----------------------------------------------------------------------------------------------


async def _look(bucket: Bucket, runtime: Runtime, chain: ChainReader, retention: Retention, dry_run: bool) -> _View:
    """Reads the time first, so objects look younger than they are, never older.

    Then lists commits, data and shortcuts, in this order. Data is written before its commit, and a shortcut after its
    data, so concurrent writes cannot make data look missing or orphaned.
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
    """The time of the store's clock. None without write permission."""
    path = f"{Folder.PROBE}{runtime.token()}"
    try:
        await bucket.put(path, b"to read the store's clock")
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
    """The commit time of each version. A listing may miss new commits. Raises if a commit is really missing."""
    found = {number: one.modified for one in objects if (number := number_of(one.path)) is not None}
    for _ in range(_MOST_HOLES):
        version = _first_hole(found)
        one = None if version is None else await find_or_list(chain.bucket, commit_path(version))
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
    """A record of this run. None if it was deleted. A record that this key must not read may hold a lease."""
    try:
        async with unlisted_means_missing(chain.bucket, one.path):
            data = await get_record(chain.bucket, one.path)
    except NotFound:
        return None
    return chain.unseal(data, kind, one.path).record


async def _read_shortcuts(chain: ChainReader, view: _View) -> None:
    async def read(found: tuple[int, ObjectInfo]) -> None:
        version, one = found
        shortcut = await chain.read_shortcut(one.path)
        if shortcut is None:
            view.unclear.add(version)  # maybe of a newer release: it may name any file
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
                raise  # this replica may need any data
            return
        if beat is not None:
            held = min(beat.version, view.head)
            view.leases.append(Lease(name, held, beat.alive_until(one.modified)))

    await each(view.heartbeats.items(), _AT_ONCE, read)
    view.leases.sort(key=lambda lease: lease.name)


async def _read_records(chain: ChainReader, objects: Iterable[ObjectInfo], now: float, grace: float) -> list[Announced]:
    """The newest gc records, down to the first whose grace period is over. Older ones add nothing."""
    numbered = {number: one for one in objects if (number := number_of(one.path)) is not None}
    found: list[Announced] = []
    for number, one in sorted(numbered.items(), reverse=True):
        try:
            record = await _read(chain, one, Gc)
        except (RunError, UnsupportedFormat):
            continue  # an invalid record allows nothing
        if record is not None and record.below == number:
            found.append(Announced(number, one.modified))
            if now - one.modified >= grace:
                break
    return found


async def _examine(
    chain: ChainReader, view: _View, retention: Retention, sizes: Mapping[str, int]
) -> tuple[list[int], list[_Versioned]]:
    """Walks down from the newest version. Returns the usable anchors (until enough are found) and the orphans.

    `sizes` are the files that count as there.
    """
    anchors: list[int] = []
    strays: list[_Versioned] = []
    reachable = True
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
            raise missing_commit(chain.where(commit_path(version)), "; nothing was deleted")
        found[version] = commit.record

    await each(versions, _AT_ONCE, read)
    return found
