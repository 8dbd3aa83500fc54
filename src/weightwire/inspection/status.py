"""What a bucket says about a run, for people: who publishes, what there is, which replicas follow and how far behind.

Reads records only, and writes nothing, so it must take this machine's clock for the store's; nothing is decided by it.
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
    StageTiming,
    commit_path,
    read_run,
    version_of,
)
from weightwire.system import Runtime

__all__ = [
    "AnchorStatus",
    "DeltaSizes",
    "PublisherStatus",
    "ReplicaStatus",
    "RunStatus",
    "VersionStatus",
    "WeightsSize",
    "read_history",
    "read_status",
]

_AT_ONCE = 16
_RECENT = 64  # versions that averages are taken over


@dataclass(frozen=True)
class VersionStatus:
    """One version, as its commit tells of it. `time` is by the publisher's clock."""

    version: int
    kind: str
    epoch: int
    step: int | None
    time: float
    changed: int
    nbytes: int
    stages: dict[str, StageTiming]
    metrics: dict[str, float | None]

    @classmethod
    def of(cls, commit: Commit) -> VersionStatus:
        return cls(
            commit.version,
            commit.kind,
            commit.epoch,
            commit.step,
            commit.time,
            commit.changed,
            commit.nbytes,
            commit.stages,
            commit.metrics,
        )


@dataclass(frozen=True)
class PublisherStatus:
    """Who has claimed the newest epoch."""

    epoch: int
    host: str
    time: float


@dataclass(frozen=True)
class AnchorStatus:
    """The newest one: where those who come from nothing start."""

    version: int
    nbytes: int


@dataclass(frozen=True)
class ReplicaStatus:
    """What a follower said last, and how long ago."""

    name: str
    host: str
    version: int
    served: int | None  # by its engines; -1: one serves none; None: it has none
    behind: int  # versions, of the newest there is: what whoever asks it gets
    seen: float  # seconds ago
    alive: bool
    stopped: bool  # on purpose
    trouble: str
    stages: dict[str, StageTiming]


@dataclass(frozen=True)
class WeightsSize:
    """How large a run's weights are."""

    tensors: int
    parameters: int
    nbytes: int

    @classmethod
    def of(cls, run: Run) -> WeightsSize:
        return cls(len(run.tensors), run.parameters, run.nbytes)


@dataclass(frozen=True)
class DeltaSizes:
    """How large the newest deltas are."""

    recent: int  # deltas that the averages are of
    average: float | None  # bytes of a delta
    ratio: float | None  # how many times smaller than all weights that is

    @classmethod
    def of(cls, commits: Sequence[Commit], whole: int) -> DeltaSizes:
        sizes = [one.nbytes for one in commits if one.kind == DELTA]
        average = sum(sizes) / len(sizes) if sizes else None
        return cls(len(sizes), average, whole / average if average else None)


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. What is None does not exist yet."""

    url: str
    run: str
    mode: str
    started: float
    weights: WeightsSize
    publisher: PublisherStatus | None
    head: VersionStatus | None
    age: float | None  # seconds since the newest version was committed
    deltas: DeltaSizes
    anchor: AnchorStatus | None
    below: int  # data below this version may be gone
    replicas: tuple[ReplicaStatus, ...]


async def read_status(bucket: Bucket, runtime: Runtime) -> RunStatus:
    """What there is to say about the run in a bucket."""
    run = await read_run(bucket)
    chain = ChainReader(bucket, run)
    commits = [one.record for one in await chain.read_newest(_RECENT)]
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
        mode=run.mode,
        started=run.time,
        weights=WeightsSize.of(run),
        publisher=PublisherStatus(claim.epoch, claim.host, claim.time) if claim else None,
        head=VersionStatus.of(head) if head else None,
        age=now - committed.modified if committed else None,
        deltas=DeltaSizes.of(commits, run.nbytes),
        anchor=await _newest_anchor(chain, newest),
        below=gc.below if gc else 0,
        replicas=tuple(await _replicas(chain, beats, newest, now)),
    )


async def read_history(bucket: Bucket, last: int) -> list[VersionStatus]:
    """The newest versions, the newest first."""
    chain = ChainReader(bucket, await read_run(bucket))
    return [VersionStatus.of(one.record) for one in reversed(await chain.read_newest(last))]


async def _newest_anchor(chain: ChainReader, head: int) -> AnchorStatus | None:
    """An object alone is no anchor: a record must name it."""
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
                behind=max(0, head - beat.reached),
                seen=seen,
                alive=now < beat.alive_until(one.modified),
                stopped=beat.stopped,
                trouble=beat.trouble,
                stages=beat.stages,
            )
        )

    await each(objects, _AT_ONCE, read)
    return sorted(found, key=lambda one: one.name)
