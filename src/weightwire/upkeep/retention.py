"""The rules of retention: which data of a run may go, and which must stay.

Pure: reads and writes nothing, and asks no clock. `upkeep` looks at a bucket and does what these say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weightwire.bucket import ObjectInfo
from weightwire.catchup import anchors_of
from weightwire.chain import Commit, DataFile, Folder, Shortcut

__all__ = [
    "DAY",
    "Announced",
    "Lease",
    "Limit",
    "Removal",
    "Retention",
    "are_enough",
    "below",
    "due",
    "first_young",
    "holds_all",
    "is_there",
    "limits",
    "newest",
    "orphans",
    "settled",
]

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Retention:
    """What is kept: the newest anchors with all that follows them, what is younger than `window` seconds, and what has
    not been announced as going for `grace` seconds."""

    anchors: int = 2
    window: float = DAY
    grace: float = 3600.0

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ValueError("at least one anchor must be kept")
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (self.window, self.grace)):
            raise ValueError("a time to keep data must be some number of seconds")

    @property
    def anchor_orphan(self) -> float:
        """An anchor is uploaded behind the versions, and named only afterwards: that may take hours."""
        return max(self.grace, DAY)

    @property
    def forgotten(self) -> float:
        """A replica that has not been heard of for so long is no longer listed."""
        return max(self.window, DAY)


@dataclass(frozen=True)
class Lease:
    """A replica and the version it holds. It needs what follows that version for as long as it is alive."""

    name: str
    version: int
    until: float

    def is_alive(self, now: float) -> bool:
        return now < self.until


@dataclass(frozen=True)
class Limit:
    """Data from this version on must stay, and why."""

    version: int
    why: str


@dataclass(frozen=True)
class Announced:
    """A gc record: since when it has been said that data below a version may go."""

    below: int
    since: float


@dataclass(frozen=True)
class Removal:
    """An object that goes; not before `due`, where there is such a time."""

    path: str
    size: int
    why: str
    due: float | None = None


def limits(
    retention: Retention, now: float, anchors: Collection[int], leases: Iterable[Lease], commits: Mapping[int, float]
) -> list[Limit]:
    """What keeps data from going, the strictest first.

    `anchors` are versions from which the newest one can be reached, `commits` says when each version was committed.
    """
    if not anchors:
        return [Limit(0, "no anchor leads to the newest version")]
    found = [Limit(min(newest(anchors, retention)), "the oldest anchor that is kept")]
    found += [
        Limit(lease.version + 1, f"replica {lease.name} is at version {lease.version}")
        for lease in leases
        if lease.version >= 0 and lease.is_alive(now)
    ]
    young = first_young(retention, now, commits)
    if young is not None:
        # Not the version alone: what leads to it must stay too.
        start = max((version for version in anchors if version <= young), default=0)
        found.append(Limit(start, f"leads to versions committed less than {retention.window / 3600:g} h ago"))
    return sorted(found, key=lambda limit: limit.version)


def first_young(retention: Retention, now: float, commits: Mapping[int, float]) -> int | None:
    """The first version that is younger than the window."""
    young = (version for version, committed in commits.items() if now - committed < retention.window)
    return min(young, default=None)


def are_enough(anchors: Collection[int], retention: Retention, young: int | None) -> bool:
    """That no older anchor matters: there are as many as are kept, and one leads to all young versions."""
    return len(anchors) >= retention.anchors and (young is None or min(anchors) <= young)


def below(
    retention: Retention, now: float, anchors: Collection[int], leases: Iterable[Lease], commits: Mapping[int, float]
) -> int:
    """The version below which data may go."""
    return limits(retention, now, anchors, leases, commits)[0].version


def settled(records: Iterable[Announced], now: float, grace: float) -> int:
    """The version below which everyone has had time to hear that data may go."""
    return max((record.below for record in records if now - record.since >= grace), default=0)


def due(records: Iterable[Announced], version: int, grace: float) -> float | None:
    """When the data of a version may go, if nothing comes in between."""
    return min((record.since + grace for record in records if record.below > version), default=None)


def is_there(files: Iterable[DataFile], sizes: Mapping[str, int]) -> bool:
    return all(sizes.get(file.path) == file.size for file in files)


def holds_all(commit: Commit, shortcuts: Iterable[Shortcut], sizes: Mapping[str, int]) -> bool:
    """Whether all weights of a version are there: by its own commit, or by an anchor beside the chain."""
    return any(is_there(anchor.files, sizes) for anchor in anchors_of(commit, shortcuts))


def orphans(
    commit: Commit, shortcuts: Iterable[Shortcut], objects: Iterable[ObjectInfo], now: float, retention: Retention
) -> list[Removal]:
    """Objects of a committed version that neither its commit nor a shortcut names, nor ever will."""
    named = {file.path for files in (commit.files, *(one.files for one in shortcuts)) for file in files}
    found = []
    for one in objects:
        patience = retention.grace if one.path.startswith(Folder.DELTAS) else retention.anchor_orphan
        if one.path not in named and now - one.modified >= patience:
            found.append(Removal(one.path, one.size, f"an orphan: version {commit.version} does not name it"))
    return found


def newest(anchors: Collection[int], retention: Retention) -> list[int]:
    return sorted(anchors)[-retention.anchors :]
