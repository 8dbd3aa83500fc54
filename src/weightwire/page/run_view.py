"""What the page shows, as plain data: built from records, and from what the headers of deltas say.

Pure: reads no bucket and draws nothing. Whatever was written into records (clocks that are wrong, numbers without
sense) becomes something that can be drawn, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weightwire.chain import Commit, Epoch, Heartbeat, PassedVersion, Run, Shortcut, StageTiming
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
    "picture_of",
    "replica_of",
    "sampled",
]

_PUBLISHING = stage_names("publisher")
_FOLLOWING = stage_names("follower", "engine")

_COLUMNS = 200  # of the heat map
_DETAILED = 300  # versions of which the stages are shown
_LATEST = 1e11  # seconds since 1970; beyond it nothing can be drawn
_LONGEST = 1e9  # seconds
_MOST = 2**53 - 1
_FARTHEST = 1e300  # a metric; beyond it no axis has room for both ends
_REMEMBERED = 2000  # versions that a replica went through

History = Mapping[tuple[int, float], PassedVersion]
"""What a replica went through, by version and the time when it began: one that starts again may do so twice."""


@dataclass(frozen=True)
class StageSpan:
    """A stage of a version: when it began, by the clock of who did it, and how long it took."""

    stage: str
    version: int
    start: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class VersionView:
    """A version, as its commit tells of it."""

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
    """Another way to a version, beside the chain. `there` tells whether its data still is."""

    version: int
    kind: str
    nbytes: int
    there: bool


@dataclass(frozen=True)
class PublisherView:
    """Who has claimed the newest epoch."""

    host: str
    epoch: int
    time: float | None


@dataclass(frozen=True)
class ReplicaView:
    """What a follower said last, and went through before.

    It is alive until `lease` seconds after it was `heard`; 0 if it was stopped.
    """

    name: str
    host: str
    version: int
    reached: int  # what whoever asks its engines gets; -1: nothing
    heard: float  # by the store's clock
    lease: float
    trouble: str
    pause: float | None  # seconds, of the last swap
    steps: tuple[tuple[float, int], ...]  # when it reached what
    spans: tuple[StageSpan, ...]


@dataclass(frozen=True)
class HeatMap:
    """Which fraction of each row changed, version by version. A version whose delta is gone has no column: None."""

    rows: tuple[str, ...] = ()
    parameters: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    columns: tuple[tuple[float, ...] | None, ...] = ()
    every: int = 1  # one version in so many is shown


@dataclass(frozen=True)
class RunView:
    """A run at one moment. `run` is empty where nothing has been published yet."""

    url: str
    at: float
    run: str = ""
    mode: str = "strict"
    started: float | None = None
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0  # of all weights
    publisher: PublisherView | None = None
    versions: tuple[VersionView, ...] = ()
    older: int = 0  # versions before these, which are not shown
    spans: tuple[StageSpan, ...] = ()
    anchors: tuple[AnchorView, ...] = ()
    below: int = 0  # data below this version may be gone
    replicas: tuple[ReplicaView, ...] = ()
    unshown: int = 0  # replicas that there are besides
    heat: HeatMap = field(default_factory=HeatMap)
    stages: tuple[Stage, ...] = STAGES  # all that a span may have, in the order of a version's way
    notes: tuple[str, ...] = ()
    trouble: str = ""  # why this is not what the bucket holds now


def picture_of(
    url: str,
    at: float,
    run: Run,
    commits: Sequence[Commit],
    *,
    publisher: Epoch | None = None,
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
    """A time that can be drawn."""
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
    """Where a stage does not say when it ended, it ended as the next one began, and the last with the commit."""
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
    """What was known of a replica and what it says now, in the order of time; the newest of it."""
    heard = {(one.version, _began(one)): one for one in beat.recent if _began(one) and 0 <= one.version <= _MOST}
    both = sorted({**history, **heard}.items(), key=lambda one: one[0][1])
    return dict(both[-_REMEMBERED:])


def _began(passed: PassedVersion) -> float:
    """When the first of its stages ended, which stays the same while others follow; 0 where nobody knows."""
    return min((at for _, stage in _known(passed.stages) if (at := moment(stage.at))), default=0.0)


def _reached(passed: PassedVersion, has_engines: bool) -> float | None:
    """When whoever asks got to see it. Not every version is: of several at once only the last is swapped."""
    stage = passed.stages.get("swap" if has_engines else "apply")
    return moment(stage.at) if stage else None


def replica_of(beat: Heartbeat, heard: float, history: History) -> ReplicaView:
    passed = list(history.values())
    swap = beat.stages.get("swap")
    return ReplicaView(
        name=beat.name,
        host=beat.host,
        version=beat.version,
        reached=beat.reached,
        heard=heard,
        lease=beat.lifetime,
        trouble=beat.trouble,
        pause=swap.seconds if swap and 0 <= swap.seconds < _LONGEST else None,
        steps=tuple((at, one.version) for one in passed if (at := _reached(one, beat.served is not None))),
        spans=tuple(span for one in passed[-_DETAILED:] for span in _passed(one)),
    )


# --- the heat map ------------------------------------------------------------------------------------------------


def sampled(commits: Sequence[Commit]) -> tuple[int, range]:
    """Which versions have a column: one in so many, a power of two, so that as a run grows most are known already."""
    if not commits:
        return 1, range(0)
    first, last, every = commits[0].version, commits[-1].version, 1
    while (last - first) // every + 1 > _COLUMNS:
        every *= 2
    return every, range(-(-first // every) * every, last + 1, every)


def heat_of(
    commits: Sequence[Commit], rows: Sequence[HeatRow], columns: Mapping[int, tuple[float, ...] | None]
) -> HeatMap:
    """`columns` are those that are known, by version."""
    every, versions = sampled(commits)
    labels, parameters = tuple(row.label for row in rows), tuple(row.parameters for row in rows)
    return HeatMap(labels, parameters, tuple(versions), tuple(columns.get(one) for one in versions), every)


def column_of(rows: Sequence[HeatRow], changed: Mapping[str, int]) -> tuple[float, ...]:
    """The changed fraction of each row, from the changed weights of each tensor."""
    return tuple(_fraction(sum(changed.get(name, 0) for name in row.tensors), row.parameters) for row in rows)


def _fraction(part: int, whole: int) -> float:
    """As exact as six figures are, which keeps the page small."""
    return float(f"{part / whole:.6g}") if whole else 0.0
