"""The data that the page shows, built from records and the headers of deltas.

Pure: reads no bucket and draws nothing. Wrong clocks and absurd numbers in records become drawable values or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weightwire.chain import Commit, Epoch, Heartbeat, PassedVersion, PublicKey, Run, Shortcut, StageTiming
from weightwire.page.layers import HeatRow
from weightwire.telemetry import STAGES, Stage, stage_names

__all__ = [
    "AnchorView",
    "HeatMap",
    "History",
    "PublisherView",
    "ReplicaView",
    "RunView",
    "StageSpan",
    "VersionView",
    "anchor_of",
    "column_of",
    "heat_of",
    "history_of",
    "moment",
    "replica_of",
    "sampled",
    "snapshot_of",
]

_PUBLISHING = stage_names("publisher")
_FOLLOWING = stage_names("follower", "engine")

_COLUMNS = 200  # of the heat map
_DETAILED = 300  # versions whose stages are shown
_LATEST = 1e11  # seconds since 1970; later times cannot be drawn
_LONGEST = 1e9  # seconds
_MOST = 2**53 - 1
_FARTHEST = 1e300  # the largest metric: the range of an axis must not overflow
_REMEMBERED = 2000  # versions in the history of a replica
_IN_FULL = 16  # replicas whose whole history is shown

History = Mapping[tuple[int, float], PassedVersion]
"""The versions that a replica passed, by version and start time: a restarted replica may pass a version twice."""


@dataclass(frozen=True)
class StageSpan:
    """A stage of a version: its start, by the clock of its machine, and its duration."""

    stage: str
    version: int
    start: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class VersionView:
    """A version, from its commit."""

    version: int
    kind: str
    epoch: int
    step: int | None
    time: float | None
    nbytes: int
    changed: int
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class AnchorView:
    """An anchor beside the chain. `there`: its data is still in the bucket."""

    version: int
    kind: str
    nbytes: int
    there: bool


@dataclass(frozen=True)
class PublisherView:
    """The publisher that claimed the newest epoch."""

    host: str
    epoch: int
    time: float | None


@dataclass(frozen=True)
class ReplicaView:
    """The last heartbeat of a follower, and its history.

    It is alive for `lease` seconds after the heartbeat. A lease of 0 means that it was stopped.
    """

    name: str
    host: str
    version: int
    served: int | None  # the lowest version that its engines serve; -1: one serves none; None: it has no engine
    reached: int  # the version that it serves, or holds if it has no engine; -1: none
    heard: float  # the time of the heartbeat by the store's clock
    lease: float
    trouble: str
    pause: float | None  # seconds, of the last swap
    steps: tuple[tuple[float, int], ...]  # time and version
    spans: tuple[StageSpan, ...]


@dataclass(frozen=True)
class HeatMap:
    """The changed fraction of each row in each version. The column of a missing delta is None."""

    rows: tuple[str, ...] = ()
    parameters: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    columns: tuple[tuple[float, ...] | None, ...] = ()
    every: int = 1  # one in `every` versions is shown


@dataclass(frozen=True)
class RunView:
    """A run at one moment. `run` is empty if nothing has been published yet."""

    url: str
    at: float
    run: str = ""
    mode: str = "strict"
    started: float | None = None
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0  # of all weights
    publisher: PublisherView | None = None
    keys: tuple[str, ...] = ()  # the short form of those that may sign; empty if the run is not signed
    versions: tuple[VersionView, ...] = ()
    older: int = 0  # versions before these are not shown
    spans: tuple[StageSpan, ...] = ()
    anchors: tuple[AnchorView, ...] = ()
    below: int = 0  # data below this version may be deleted
    replicas: tuple[ReplicaView, ...] = ()
    unshown: int = 0  # more replicas that are not shown
    heat: HeatMap = field(default_factory=HeatMap)
    stages: tuple[Stage, ...] = STAGES  # every stage that a span can have, in pipeline order
    notes: tuple[str, ...] = ()
    trouble: str = ""  # why this snapshot is out of date


def snapshot_of(
    url: str,
    at: float,
    run: Run,
    commits: Sequence[Commit],
    *,
    publisher: Epoch | None = None,
    keys: Iterable[str] = (),
    anchors: Iterable[AnchorView] = (),
    below: int = 0,
    replicas: Sequence[ReplicaView] = (),
    unshown: int = 0,
    heat: HeatMap | None = None,
    notes: Iterable[str] = (),
) -> RunView:
    return RunView(
        url=url,
        at=at,
        run=run.run,
        mode=run.mode,
        started=moment(run.time),
        tensors=len(run.tensors),
        parameters=sum(math.prod(shape) for _, shape in run.tensors.values()),
        nbytes=run.nbytes,
        publisher=PublisherView(publisher.host, publisher.epoch, moment(publisher.time)) if publisher else None,
        keys=tuple(PublicKey(key).short for key in sorted(keys)),
        versions=tuple(map(_version, commits)),
        older=commits[0].version if commits else 0,
        spans=tuple(span for commit in commits[-_DETAILED:] for span in _published(commit)),
        anchors=tuple(sorted(anchors, key=lambda one: one.version)),
        below=below,
        replicas=tuple(replicas),
        unshown=unshown,
        heat=heat or HeatMap(),
        notes=tuple(notes),
    )


def moment(seconds: float) -> float | None:
    """The time, or None if it cannot be drawn."""
    return seconds if 0 < seconds < _LATEST else None


def _version(commit: Commit) -> VersionView:
    return VersionView(
        commit.version,
        commit.kind,
        commit.epoch,
        commit.step,
        moment(commit.time),
        commit.nbytes,
        commit.changed,
        {name: _drawable(value) for name, value in commit.metrics.items()},
    )


def _drawable(metric: float | None) -> float | None:
    return metric if metric is not None and abs(metric) <= _FARTHEST else None


def anchor_of(shortcut: Shortcut, there: bool) -> AnchorView:
    return AnchorView(shortcut.version, shortcut.kind, shortcut.nbytes, there)


# --- stages ------------------------------------------------------------------------------------------------------


def _published(commit: Commit) -> list[StageSpan]:
    """If a stage has no end time, it ends where the next one starts, and the last one ends with the commit."""
    spans: list[StageSpan] = []
    ended = commit.time
    for name in reversed(_PUBLISHING):
        stage = commit.stages.get(name)
        span = stage and _span(name, commit.version, stage, stage.at or ended)
        if span:
            spans.append(span)
            ended = span.start
    return spans[::-1]


def _passed(passed: PassedVersion) -> list[StageSpan]:
    found = (_span(name, passed.version, stage, stage.at) for name, stage in _known(passed.stages))
    return [span for span in found if span]


def _known(stages: Mapping[str, StageTiming]) -> list[tuple[str, StageTiming]]:
    return [(name, stages[name]) for name in _FOLLOWING if name in stages]


def _span(name: str, version: int, stage: StageTiming, ended: float) -> StageSpan | None:
    if not 0 <= stage.seconds < _LONGEST or moment(ended) is None or moment(ended - stage.seconds) is None:
        return None
    return StageSpan(name, version, ended - stage.seconds, stage.seconds, min(max(0, stage.bytes), _MOST))


# --- replicas ----------------------------------------------------------------------------------------------------


def history_of(history: History, beat: Heartbeat) -> History:
    """The history with the versions of a heartbeat added, in order of time, limited to the newest."""
    new = {(one.version, _began(one)): one for one in beat.recent if _began(one) and 0 <= one.version <= _MOST}
    both = sorted({**history, **new}.items(), key=lambda one: one[0][1])
    return dict(both[-_REMEMBERED:])


def _began(passed: PassedVersion) -> float:
    """The end of its first stage, which stays the same as later stages are added; 0 if unknown."""
    return min((at for _, stage in _known(passed.stages) if (at := moment(stage.at))), default=0.0)


def _reached(passed: PassedVersion, has_engines: bool) -> float | None:
    """When the version was served. A batch of versions is swapped at once, and only the last has a swap."""
    stage = passed.stages.get("swap" if has_engines else "apply")
    return moment(stage.at) if stage else None


def replica_of(beat: Heartbeat, heard: float, history: History, *, among: int = 1) -> ReplicaView:
    """The view of one replica `among` several. With more replicas, each history is shorter, to bound the snapshot."""
    passed = list(history.values())[-_share(_REMEMBERED, among) :]
    swap = beat.stages.get("swap")
    return ReplicaView(
        name=beat.name,
        host=beat.host,
        version=beat.version,
        served=beat.served,
        reached=beat.reached,
        heard=heard,
        lease=beat.lifetime,
        trouble=beat.trouble,
        pause=swap.seconds if swap and 0 <= swap.seconds < _LONGEST else None,
        steps=tuple((at, one.version) for one in passed if (at := _reached(one, beat.served is not None))),
        spans=tuple(span for one in passed[-_share(_DETAILED, among) :] for span in _passed(one)),
    )


def _share(most: int, among: int) -> int:
    return most * _IN_FULL // max(_IN_FULL, among)


# --- the heat map ------------------------------------------------------------------------------------------------


def sampled(commits: Sequence[Commit]) -> tuple[int, range]:
    """The versions that have a column. The step is a power of two, so most columns stay valid as a run grows."""
    if not commits:
        return 1, range(0)
    first, last, every = commits[0].version, commits[-1].version, 1
    while (last - first) // every + 1 > _COLUMNS:
        every *= 2
    return every, range(-(-first // every) * every, last + 1, every)


def heat_of(
    commits: Sequence[Commit], rows: Sequence[HeatRow], columns: Mapping[int, tuple[float, ...] | None]
) -> HeatMap:
    """`columns` has the known columns by version."""
    every, versions = sampled(commits)
    labels, parameters = tuple(row.label for row in rows), tuple(row.parameters for row in rows)
    return HeatMap(labels, parameters, tuple(versions), tuple(columns.get(one) for one in versions), every)


def column_of(rows: Sequence[HeatRow], changed: Mapping[str, int]) -> tuple[float, ...]:
    """The changed fraction of each row, from the number of changed weights in each tensor."""
    return tuple(_fraction(sum(changed.get(name, 0) for name in row.tensors), row.parameters) for row in rows)


def _fraction(part: int, whole: int) -> float:
    """Rounded to six digits, which keeps the page small."""
    return float(f"{part / whole:.6g}") if whole else 0.0
