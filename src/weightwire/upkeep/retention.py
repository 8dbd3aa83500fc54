"""The rules of retention: which data of a run can be deleted. Pure: `gc` applies them to a bucket."""

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
    "due",
    "first_young",
    "holds_all",
    "is_there",
    "limits",
    "newest",
    "orphans",
    "relied_on",
    "settled",
]

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Retention:
    """What to keep: the newest `anchors` with everything after them, and data younger than `window` seconds.

    Other data is deleted `grace` seconds after a gc record has announced it.
    """

    anchors: int = 2
    window: float = DAY
    grace: float = 3600.0

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ValueError("anchors must be 1 or more")
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (self.window, self.grace)):
            raise ValueError("window and grace must be finite numbers of seconds, 0 or more")

    @property
    def anchor_orphan(self) -> float:
        """The age at which an unnamed anchor is an orphan. Uploading one in the background may take hours."""
        return max(self.grace, DAY)

    @property
    def forgotten(self) -> float:
        """The age at which the heartbeat of a replica is deleted."""
        return max(self.window, DAY)


@dataclass(frozen=True)
class Lease:
    """A replica and its version. While it is alive, the data after that version stays."""

    name: str
    version: int
    until: float

    def is_alive(self, now: float) -> bool:
        return now < self.until


@dataclass(frozen=True)
class Limit:
    """A reason to keep data from this version on."""

    version: int
    why: str


@dataclass(frozen=True)
class Announced:
    """A gc record: since when the deletion of data below a version has been announced."""

    below: int
    since: float


@dataclass(frozen=True)
class Removal:
    """An object to delete, not before `due` if that is set."""

    path: str
    size: int
    why: str
    due: float | None = None


def limits(
    retention: Retention,
    now: float,
    anchors: Collection[int],
    leases: Iterable[Lease],
    commits: Mapping[int, float],
    more: Iterable[Limit] = (),
) -> list[Limit]:
    """What keeps data from being deleted, the strictest limit first.

    `anchors` are versions from which the newest one can be reached. `commits` maps versions to their commit times.
    """
    if not anchors:
        return [Limit(0, "no anchor leads to the newest version")]
    found = [Limit(min(newest(anchors, retention)), "oldest anchor to keep")]
    found += [
        Limit(lease.version + 1, f"replica {lease.name} is at version {lease.version}")
        for lease in leases
        if lease.version >= 0 and lease.is_alive(now)
    ]
    young = first_young(retention, now, commits)
    if young is not None:
        # The data that leads to the version must stay as well.
        start = max((version for version in anchors if version <= young), default=0)
        found.append(Limit(start, f"needed for versions committed less than {retention.window / 3600:g} h ago"))
    return sorted([*found, *more], key=lambda limit: limit.version)


def relied_on(retention: Retention, now: float, anchors: Collection[int], commits: Mapping[int, float]) -> set[int]:
    """The anchors that justify a deletion: those to keep, and the one that leads to all young versions."""
    young = first_young(retention, now, commits)
    start = max((version for version in anchors if young is not None and version <= young), default=None)
    return {*newest(anchors, retention)} | (set() if start is None else {start})


def first_young(retention: Retention, now: float, commits: Mapping[int, float]) -> int | None:
    """The first version younger than the window."""
    young = (version for version, committed in commits.items() if now - committed < retention.window)
    return min(young, default=None)


def are_enough(anchors: Collection[int], retention: Retention, young: int | None) -> bool:
    """Whether older anchors are irrelevant: enough are kept, and one leads to all young versions."""
    return len(anchors) >= retention.anchors and (young is None or min(anchors) <= young)


def settled(records: Iterable[Announced], now: float, grace: float) -> int:
    """The version below which the grace period is over."""
    return max((record.below for record in records if now - record.since >= grace), default=0)


def due(records: Iterable[Announced], version: int, grace: float) -> float | None:
    """When the data of a version can be deleted, if no new limit appears."""
    return min((record.since + grace for record in records if record.below > version), default=None)


def is_there(files: Iterable[DataFile], sizes: Mapping[str, int]) -> bool:
    return all(sizes.get(file.path) == file.size for file in files)


def holds_all(commit: Commit, shortcuts: Iterable[Shortcut], sizes: Mapping[str, int]) -> bool:
    """Whether a complete anchor of a version exists: its own commit, or a shortcut."""
    return any(is_there(anchor.files, sizes) for anchor in anchors_of(commit, shortcuts))


def orphans(
    commit: Commit, shortcuts: Iterable[Shortcut], objects: Iterable[ObjectInfo], now: float, retention: Retention
) -> list[Removal]:
    """Objects of a committed version that neither its commit nor a shortcut names."""
    named = {file.path for files in (commit.files, *(one.files for one in shortcuts)) for file in files}
    found = []
    for one in objects:
        patience = retention.grace if one.path.startswith(Folder.DELTAS) else retention.anchor_orphan
        if one.path not in named and now - one.modified >= patience:
            found.append(Removal(one.path, one.size, f"orphaned: version {commit.version} does not name it"))
    return found


def newest(anchors: Collection[int], retention: Retention) -> list[int]:
    return sorted(anchors)[-retention.anchors :]
