"""The path to a version: which anchor or base to start from, and which deltas to apply.

Reads records only. Callers pass the paths of lost files, which every plan avoids.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from weightwire.bucket import each
from weightwire.chain import (
    ANCHOR,
    BASE,
    ChainReader,
    Commit,
    Folder,
    Sealed,
    Shortcut,
    commit_path,
    rolled_back,
    shortcut_version,
)
from weightwire.errors import DataGone, PermissionDenied

__all__ = ["NEED_ANCHOR", "ChainPath", "NoPath", "Start", "anchors_of", "find_anchors", "plan", "plan_newest"]

NEED_ANCHOR = (
    "restart the trainer with anchor_every=1; or stop it and run `weightwire publish DIR URL --anchor-every 1`"
)
"""The hint for a run that needs a new anchor. Publishing takes the run over, so a live trainer must stop first."""

_ENOUGH = 4  # anchors to choose from
_AT_ONCE = 16  # shortcuts that are read at the same time
_MOST_TRIED = 256  # shortcuts that are read: the rest may be junk

Start = Shortcut | Commit
"""Where a path without a held version begins: an anchor beside the chain, or a commit of kind anchor or base."""


@dataclass(frozen=True)
class ChainPath:
    """How to get to a version: from `start`, or from the version held if that is None, then by these commits in order.

    `origin` is the commit of the version that the first of them builds on.
    """

    start: Start | None
    origin: Sealed[Commit]
    commits: tuple[Sealed[Commit], ...]

    @property
    def target(self) -> Sealed[Commit]:
        return self.commits[-1] if self.commits else self.origin

    @property
    def nbytes(self) -> int:
        return (self.start.nbytes if self.start else 0) + sum(commit.record.nbytes for commit in self.commits)


class NoPath(DataGone):
    """No path leads to a version. `blocked_by` is the lost file that blocks the newest one, if any."""

    def __init__(self, message: str, *, hint: str | None = None, blocked_by: str = "") -> None:
        super().__init__(message, hint=hint)
        self.blocked_by = blocked_by


async def plan(
    chain: ChainReader, target: Sealed[Commit], at: Sealed[Commit] | None = None, lost: Container[str] = ()
) -> ChainPath:
    """The cheapest path to `target`: from `at`, or from the newest anchor or base. Raises NoPath if there is none.

    Every commit of the path is checked against its parent, and the start is proven to belong to the chain.
    """
    found = await _search(chain, target, at, lost)
    if not isinstance(found, ChainPath):
        raise _no_path(chain, target, found.record, lost)
    return found


async def plan_newest(
    chain: ChainReader, head: Sealed[Commit], at: Sealed[Commit] | None = None, lost: Container[str] = ()
) -> ChainPath:
    """The cheapest path to the newest reachable version up to `head`, never to one before `at`."""
    target = head
    while True:
        found = await _search(chain, target, at, lost)
        if isinstance(found, ChainPath):
            return found
        # Versions from this commit on need the lost file; try the one before it.
        target = await chain.read_parent(found) if found.record.version else found
        if not target.record.after:
            raise _no_path(chain, head, found.record, lost)


async def find_anchors(chain: ChainReader, most: int, lost: Container[str] = ()) -> dict[int, Shortcut]:
    """The newest anchors beside the chain, up to version `most`, by version."""
    try:
        paths = [one.path for one in await chain.bucket.list(Folder.SHORTCUTS)]
    except PermissionDenied:  # a key without list permission: only HEAD.json names an anchor
        hint = await chain.read_hint()
        paths = [hint.anchor] if hint and hint.anchor else []
    dated = [(version, path) for path in paths if (version := shortcut_version(path)) is not None and version <= most]
    newest = sorted(dated, reverse=True)[:_MOST_TRIED]
    found: dict[int, Shortcut] = {}
    while newest and len(found) < _ENOUGH:
        # Usually the first few are valid. Anyone with write access may have added junk.
        size = _AT_ONCE if found or len(newest) < min(len(dated), _MOST_TRIED) else _ENOUGH
        batch, newest = newest[:size], newest[size:]
        for version, shortcut in await _read_all(chain, [one for one in batch if one[0] not in found]):
            if shortcut is not None and not _lost_of(shortcut, lost) and len(found) < _ENOUGH:
                found.setdefault(version, shortcut)
    return found


async def _read_all(chain: ChainReader, paths: Sequence[tuple[int, str]]) -> list[tuple[int, Shortcut | None]]:
    """The shortcuts at these paths, in order. None if one is missing or invalid."""
    read: dict[str, Shortcut | None] = {}

    async def one(path: str) -> None:
        read[path] = await chain.read_shortcut(path)

    await each([path for _, path in paths], _AT_ONCE, one)
    return [(version, read[path]) for version, path in paths]


def anchors_of(commit: Commit, shortcuts: Iterable[Shortcut]) -> Sequence[Start]:
    """All anchors of a version: shortcuts to the state of its commit, and the commit itself if it is an anchor."""
    found = [shortcut for shortcut in shortcuts if shortcut.after == commit.after]
    return [*found, commit] if commit.kind == ANCHOR else found


async def _search(
    chain: ChainReader, target: Sealed[Commit], at: Sealed[Commit] | None, lost: Container[str]
) -> ChainPath | Sealed[Commit]:
    """Searches back from the target. Without a path, returns the commit at which the search ended."""
    anchors = await find_anchors(chain, target.record.version, lost)
    commits: list[Sealed[Commit]] = []  # newest first
    best: ChainPath | None = None
    cost, commit = 0, target
    while True:
        version = commit.record.version
        if at is not None and version == at.record.version:
            _check_same(chain, at, commit)
            return ChainPath(None, at, tuple(reversed(commits)))
        start = _start(commit.record, anchors.get(version), lost)
        if start is not None and (best is None or cost + start.nbytes < best.nbytes):
            best = ChainPath(start, commit, tuple(reversed(commits)))
        if commit.record.kind in (ANCHOR, BASE) or version == 0 or _lost_of(commit.record, lost):
            break
        cost += commit.record.nbytes
        if best is not None and (at is None or version < at.record.version or cost >= best.nbytes):
            break
        commits.append(commit)
        commit = await chain.read_parent(commit)
    if best is None:
        return commit
    if best.origin.record.version:
        await chain.read_parent(best.origin)
        await chain.read_linked(0, await chain.prove(best.origin, 0))
    return best


def _no_path(chain: ChainReader, target: Sealed[Commit], blocked: Commit, lost: Container[str]) -> NoPath:
    return NoPath(
        f"{chain.bucket.url}: no anchor leads to version {target.record.version}",
        hint=NEED_ANCHOR,
        blocked_by=_lost_of(blocked, lost),
    )


def _check_same(chain: ChainReader, at: Sealed[Commit], commit: Sealed[Commit]) -> None:
    if commit.sha256 != at.sha256:
        raise rolled_back(
            f"{chain.where(commit_path(at.record.version))}: is not the commit that this replica holds",
        )


def _start(commit: Commit, shortcut: Shortcut | None, lost: Container[str]) -> Start | None:
    starts = [commit] if commit.kind == BASE else anchors_of(commit, [shortcut] if shortcut else [])
    return next((start for start in starts if not _lost_of(start, lost)), None)


def _lost_of(start: Start, lost: Container[str]) -> str:
    """The first of its files that is lost, or an empty string."""
    return next((file.path for file in start.files if file.path in lost), "")
