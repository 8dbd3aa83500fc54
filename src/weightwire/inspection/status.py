"""What a bucket says about a run, for people: who publishes, what there is, which replicas follow and how far behind.

Reads records only, and writes nothing, so it must take this machine's clock for the store's; nothing is decided by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.chain import (
    ANCHOR,
    DELTA,
    ChainReader,
    Commit,
    Epoch,
    Gc,
    Heartbeat,
    Record,
    Sealed,
    StageTiming,
    Start,
    commit_path,
    epoch_path,
    gc_path,
    heartbeat_path,
    read_run,
)
from weightwire.errors import BrokenChain, NotFound, RunError, UnsupportedFormat
from weightwire.system import Runtime

__all__ = [
    "AnchorStatus",
    "PublisherStatus",
    "ReplicaStatus",
    "RunStatus",
    "VersionStatus",
    "read_history",
    "read_status",
]

_LANES = 16
_RECENT = 64  # versions that averages are taken over

_NUMBERED = re.compile(r"(?:epochs|gc)/([0-9]{8,20})\.json")
_ANCHORED = re.compile(r"anchors/([0-9]{1,19})/.+")

AnyRecord = TypeVar("AnyRecord", bound=Record)


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
    trouble: str
    stages: dict[str, StageTiming]


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. What is None does not exist yet."""

    url: str
    run: str
    mode: str
    started: float
    tensors: int
    parameters: int
    nbytes: int  # of all weights
    publisher: PublisherStatus | None
    head: VersionStatus | None
    age: float | None  # seconds since the newest version was committed
    recent: int  # deltas that the averages are of
    average: float | None  # bytes of a delta
    ratio: float | None  # how many times smaller than all weights that is
    anchor: AnchorStatus | None
    below: int  # data below this version may be gone
    replicas: tuple[ReplicaStatus, ...]


async def read_status(bucket: Bucket, runtime: Runtime) -> RunStatus:
    """What there is to say about the run in a bucket."""
    run = await read_run(bucket)
    chain = ChainReader(bucket, run)
    head = await chain.read_head()
    committed = await bucket.find(commit_path(head.record.version)) if head else None
    beats = await bucket.list("replicas/")
    now = max([runtime.time(), committed.modified if committed else 0.0, *(one.modified for one in beats)])
    deltas = [one for one in await _newest(chain, head, _RECENT) if one.kind == DELTA]
    average = sum(one.nbytes for one in deltas) / len(deltas) if deltas else None
    claim = await _last(chain, "epochs/", Epoch)
    gc = await _last(chain, "gc/", Gc)
    return RunStatus(
        url=bucket.url,
        run=run.run,
        mode=run.mode,
        started=run.time,
        tensors=len(run.tensors),
        parameters=sum(math.prod(shape) for _, shape in run.tensors.values()),
        nbytes=run.nbytes,
        publisher=PublisherStatus(claim.epoch, claim.host, claim.time) if claim else None,
        head=VersionStatus.of(head.record) if head else None,
        age=now - committed.modified if committed else None,
        recent=len(deltas),
        average=average,
        ratio=run.nbytes / average if average else None,
        anchor=await _newest_anchor(chain, head.record.version if head else -1),
        below=gc.below if gc else 0,
        replicas=tuple(await _replicas(chain, beats, head.record.version if head else -1, now)),
    )


async def read_history(bucket: Bucket, last: int) -> list[VersionStatus]:
    """The newest versions, the newest first."""
    chain = ChainReader(bucket, await read_run(bucket))
    return [VersionStatus.of(commit) for commit in await _newest(chain, await chain.read_head(), last)]


async def _newest(chain: ChainReader, head: Sealed[Commit] | None, last: int) -> list[Commit]:
    """The newest commits, the newest first; each must be the one that the next was built on."""
    if head is None or last < 1:
        return []
    found = {head.record.version: head}

    async def read(version: int) -> None:
        commit = await chain.read(version)
        if commit is None:
            raise BrokenChain(
                f"{chain.where(commit_path(version))}: is missing, though later versions are there",
                hint="`weightwire verify` finds out how far the chain is whole",
            )
        found[version] = commit

    versions = range(head.record.version, max(-1, head.record.version - last), -1)
    await each(versions[1:], _LANES, read)
    for version in versions[1:]:
        chain.check_follows(found[version], found[version + 1])
    return [found[version].record for version in versions]


async def _read(chain: ChainReader, path: str, kind: type[AnyRecord]) -> AnyRecord | None:
    """A record of this run, if it is one that we can read: anyone who may write may have put something there."""
    try:
        return chain.unseal(await chain.bucket.get(path), kind, path).record
    except (NotFound, RunError, UnsupportedFormat):
        return None


async def _last(chain: ChainReader, folder: str, kind: type[AnyRecord]) -> AnyRecord | None:
    """The record with the highest number."""
    paths = [one.path for one in await chain.bucket.list(folder) if _NUMBERED.fullmatch(one.path)]
    for path in sorted(paths, key=_number, reverse=True):
        record = await _read(chain, path, kind)
        if isinstance(record, Epoch) and epoch_path(record.epoch) == path:
            return record
        if isinstance(record, Gc) and gc_path(record.below) == path:
            return record
    return None


def _number(path: str) -> int:
    matched = _NUMBERED.fullmatch(path)
    return int(matched[1]) if matched else -1


async def _newest_anchor(chain: ChainReader, head: int) -> AnchorStatus | None:
    """An object alone is no anchor: a record must name it."""
    listed = {one.path for one in await chain.bucket.list("anchors/")}
    versions = {int(matched[1]) for path in listed if (matched := _ANCHORED.fullmatch(path))}
    shortcuts = await chain.anchors(head)
    for version in sorted((one for one in versions if one <= head), reverse=True):
        commit, shortcut = await chain.read(version), shortcuts.get(version)
        if commit is None:
            continue
        ways: list[Start] = [commit.record] if commit.record.kind == ANCHOR else []
        if shortcut is not None and shortcut.after == commit.record.after:
            ways.append(shortcut)
        for way in ways:
            if all(file.path in listed for file in way.files):
                return AnchorStatus(version, way.nbytes)
    return None


async def _replicas(chain: ChainReader, objects: Sequence[ObjectInfo], head: int, now: float) -> list[ReplicaStatus]:
    found: list[ReplicaStatus] = []

    async def read(one: ObjectInfo) -> None:
        beat = await _read(chain, one.path, Heartbeat)
        if beat is None or heartbeat_path(beat.name) != one.path:
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
                alive=seen < beat.lease,
                trouble=beat.trouble,
                stages=beat.stages,
            )
        )

    await each(objects, _LANES, read)
    return sorted(found, key=lambda one: one.name)
