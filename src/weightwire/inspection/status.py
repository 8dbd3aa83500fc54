"""The status of a run: its publisher, its versions, its replicas and how far behind they are.

Reads records only. Ages are by this machine's clock: reading the store's needs a write. Nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.catchup import anchors_of, find_anchors
from weightwire.chain import (
    DELTA,
    ChainReader,
    Commit,
    Folder,
    Run,
    Sealed,
    StageTiming,
    Trust,
    Warn,
    commit_path,
    read_run,
    shortcut_version,
    version_of,
)
from weightwire.errors import BrokenChain, PermissionDenied
from weightwire.system import Runtime

__all__ = [
    "AnchorStatus",
    "DeltaSizes",
    "PublisherStatus",
    "ReplicaStatus",
    "RunHistory",
    "RunStatus",
    "VersionStatus",
    "WeightsSize",
    "read_history",
    "read_keys",
    "read_status",
]

_AT_ONCE = 16
_RECENT = 64  # versions that averages cover
_MOST_SHORTCUTS = 1024  # of the versions shown: the rest may be junk


@dataclass(frozen=True)
class VersionStatus:
    """One version, from its commit. `time` is by the publisher's clock."""

    version: int
    kind: str
    epoch: int
    step: int | None
    time: float
    state: str
    changed: int
    nbytes: int
    anchor_bytes: int | None  # of an anchor beside the chain; None if there is none
    stages: dict[str, StageTiming]
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, commit: Commit, anchor_bytes: int | None = None) -> VersionStatus:
        return cls(
            commit.version,
            commit.kind,
            commit.epoch,
            commit.step,
            commit.time,
            commit.after,
            commit.changed,
            commit.nbytes,
            anchor_bytes,
            commit.stages,
            commit.metrics,
        )


@dataclass(frozen=True)
class PublisherStatus:
    """The publisher with the newest epoch."""

    epoch: int
    host: str
    time: float


@dataclass(frozen=True)
class AnchorStatus:
    """The newest anchor, where new replicas start."""

    version: int
    nbytes: int


@dataclass(frozen=True)
class ReplicaStatus:
    """The last heartbeat of a follower."""

    name: str
    host: str
    version: int
    served: int | None  # lowest version that its engines serve; -1 if one serves none, None without engines
    behind: int | None  # versions between the newest and the served one; None if none is served
    seen: float  # seconds ago
    alive: bool
    stopped: bool  # on purpose
    trouble: str
    stages: dict[str, StageTiming]


@dataclass(frozen=True)
class WeightsSize:
    """The size of a run's weights."""

    tensors: int
    parameters: int
    nbytes: int

    @classmethod
    def of(cls, run: Run) -> WeightsSize:
        return cls(len(run.tensors), run.parameters, run.nbytes)


@dataclass(frozen=True)
class DeltaSizes:
    """The size of the newest deltas."""

    recent: int  # number of deltas in the averages
    average: float | None  # bytes per delta
    ratio: float | None  # size of all weights / average

    @classmethod
    def of(cls, commits: Sequence[Commit], whole: int) -> DeltaSizes:
        sizes = [one.nbytes for one in commits if one.kind == DELTA]
        average = sum(sizes) / len(sizes) if sizes else None
        return cls(len(sizes), average, whole / average if average else None)


@dataclass(frozen=True)
class PublishRights:
    """Who may publish. `keys` are the public keys that may sign, in hex; empty if the run is not signed."""

    mode: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. None: does not exist yet."""

    url: str
    run: str
    rights: PublishRights
    started: float
    weights: WeightsSize
    publisher: PublisherStatus | None
    head: VersionStatus | None
    age: float | None  # seconds since the newest version was committed
    deltas: DeltaSizes
    anchor: AnchorStatus | None
    below: int  # retention has deleted the data below this version; 0 if it has deleted nothing
    replicas: tuple[ReplicaStatus, ...]


@dataclass(frozen=True)
class RunHistory:
    """The newest versions of a run, the newest first."""

    url: str
    run: str
    versions: tuple[VersionStatus, ...]


async def read_status(
    bucket: Bucket, runtime: Runtime, warn: Warn | None = None, trust: Trust | None = None
) -> RunStatus:
    """The status of the run in a bucket. A broken chain is an error, unless it can be passed to `warn`."""
    run = await read_run(bucket)
    chain = ChainReader(bucket, run, trust)
    await chain.check_not_rolled_back()
    newest_commits = await _read_newest(chain, _RECENT, warn)
    commits = [one.record for one in newest_commits]
    head = commits[-1] if commits else None
    newest = head.version if head else -1
    committed = await bucket.find(commit_path(newest)) if head else None
    beats = await bucket.list(Folder.REPLICAS)
    now = max([runtime.time(), committed.modified if committed else 0.0, *(one.modified for one in beats)])
    claim = await chain.newest_epoch(await bucket.list(Folder.EPOCHS))
    gc = await chain.newest_gc(await bucket.list(Folder.GC))
    return RunStatus(
        url=bucket.url,
        run=run.run,
        rights=PublishRights(run.mode, tuple(sorted(await chain.keys_after(newest_commits[-1] if head else None)))),
        started=run.time,
        weights=WeightsSize.of(run),
        publisher=PublisherStatus(claim.epoch, claim.host, claim.time) if claim else None,
        head=VersionStatus.of(head, (await _anchor_sizes(chain, [head])).get(newest)) if head else None,
        age=now - committed.modified if committed else None,
        deltas=DeltaSizes.of(commits, run.nbytes),
        anchor=await _newest_anchor(chain, newest),
        below=await _deleted_below(chain, gc.below) if gc else 0,
        replicas=tuple(await _replicas(chain, beats, newest, now)),
    )


async def read_keys(bucket: Bucket, trust: Trust | None = None) -> list[str]:
    """The public keys that may sign the next version, in hex; empty if the run is not signed."""
    chain = ChainReader(bucket, await read_run(bucket), trust)
    await chain.check_not_rolled_back()
    return sorted(await chain.keys_after(await chain.read_head()))


async def read_history(bucket: Bucket, last: int, warn: Warn | None = None) -> RunHistory:
    """The newest versions of the run in a bucket. A broken chain is an error, unless it can be passed to `warn`."""
    chain = ChainReader(bucket, await read_run(bucket))
    commits = [one.record for one in reversed(await _read_newest(chain, last, warn))]
    anchors = await _anchor_sizes(chain, commits)
    return RunHistory(
        bucket.url, chain.run.run, tuple(VersionStatus.of(one, anchors.get(one.version)) for one in commits)
    )


async def _read_newest(chain: ChainReader, most: int, warn: Warn | None) -> list[Sealed[Commit]]:
    """The newest commits, the newest last. With `warn`, fewer of them if the chain is broken."""
    broken = ""
    while True:
        try:
            found = await chain.read_newest(most)
        except BrokenChain as problem:
            if warn is None or most == 1:
                raise
            most, broken = most // 2, problem.message
            continue
        if warn is not None and broken:
            warn(broken)
        return found


async def _anchor_sizes(chain: ChainReader, commits: Sequence[Commit]) -> dict[int, int]:
    """Sizes of the anchors beside the chain, by version."""
    states = {one.version: one.after for one in commits}
    try:
        listed = await chain.bucket.list(Folder.SHORTCUTS)
    except PermissionDenied:  # a key without list permission
        return {}
    found: dict[int, int] = {}

    async def read(path: str) -> None:
        shortcut = await chain.read_shortcut(path)
        if shortcut is not None and shortcut.after == states[shortcut.version]:
            found[shortcut.version] = shortcut.nbytes

    shown = [one.path for one in listed if shortcut_version(one.path) in states]
    await each(shown[:_MOST_SHORTCUTS], _AT_ONCE, read)
    return found


async def _deleted_below(chain: ChainReader, announced: int) -> int:
    """The version below which data is deleted; 0 if none is. `announced` is the limit in the newest gc record."""
    objects = [*await chain.bucket.list(Folder.DELTAS), *await chain.bucket.list(Folder.ANCHORS)]
    kept = {version for one in objects if (version := version_of(one.path)) is not None}
    first = min([announced, *kept])
    for version in range(first - 1, max(-1, first - 1 - _RECENT), -1):  # fences and bases have no data to delete
        commit = await chain.read(version)
        if commit is not None and commit.record.files:
            return first
    return 0


async def _newest_anchor(chain: ChainReader, head: int) -> AnchorStatus | None:
    """The newest anchor that a record names and whose files all exist."""
    listed = {one.path for one in await chain.bucket.list(Folder.ANCHORS)}
    versions = {version for path in listed if (version := version_of(path)) is not None}
    shortcuts = await find_anchors(chain, head)
    for version in sorted((one for one in versions if one <= head), reverse=True):
        commit, shortcut = await chain.read(version), shortcuts.get(version)
        if commit is None:
            continue
        for anchor in anchors_of(commit.record, [shortcut] if shortcut else []):
            if all(file.path in listed for file in anchor.files):
                return AnchorStatus(version, anchor.nbytes)
    return None


async def _replicas(chain: ChainReader, objects: Sequence[ObjectInfo], head: int, now: float) -> list[ReplicaStatus]:
    found: list[ReplicaStatus] = []

    async def read(one: ObjectInfo) -> None:
        beat = await chain.read_heartbeat(one.path)
        if beat is None:
            return
        seen = now - one.modified
        found.append(
            ReplicaStatus(
                name=beat.name,
                host=beat.host,
                version=beat.version,
                served=beat.served,
                behind=None if beat.reached < 0 else max(0, head - beat.reached),
                seen=seen,
                alive=now < beat.alive_until(one.modified),
                stopped=beat.stopped,
                trouble=beat.trouble,
                stages=beat.stages,
            )
        )

    await each(objects, _AT_ONCE, read)
    return sorted(found, key=lambda one: one.name)
