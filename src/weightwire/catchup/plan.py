"""The way to a version: which anchor or base to start from, and which deltas to apply.

Reads records only. Files that turned out to be lost are passed in by path, and no way leads over them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from weightwire.chain import ANCHOR, BASE, ChainReader, Commit, Folder, Sealed, Shortcut, commit_path, shortcut_version
from weightwire.errors import BrokenChain, DataGone, PermissionDenied

__all__ = ["ChainPath", "NoWay", "Start", "anchors_of", "find_anchors", "plan", "plan_newest"]

_ENOUGH = 4  # anchors to choose from

Start = Shortcut | Commit
"""Where a path from nothing begins: an anchor beside the chain, or a commit of kind anchor or base."""


@dataclass(frozen=True)
class ChainPath:
    """How to get to a version: from `start` (None: from the version held), then by these commits in turn.

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


class NoWay(DataGone):
    """No path leads to a version. `blocked_by` is the path of the lost file at which the newest ones end, if any."""

    def __init__(self, message: str, *, hint: str | None = None, blocked_by: str = "") -> None:
        super().__init__(message, hint=hint)
        self.blocked_by = blocked_by


async def plan(
    chain: ChainReader, target: Sealed[Commit], at: Sealed[Commit] | None = None, lost: Container[str] = ()
) -> ChainPath:
    """The cheapest way to `target`: on from `at`, or from the newest anchor or base. Raises NoWay if there is none.

    Every commit on the way is checked against the one before it, and its beginning is proven to belong to the chain.
    """
    found = await _search(chain, target, at, lost)
    if not isinstance(found, ChainPath):
        raise _no_way(chain, target, found.record, lost)
    return found


async def plan_newest(
    chain: ChainReader, head: Sealed[Commit], at: Sealed[Commit] | None = None, lost: Container[str] = ()
) -> ChainPath:
    """The cheapest way to the newest version up to `head` that can be reached: never one before `at`."""
    target = head
    while True:
        found = await _search(chain, target, at, lost)
        if isinstance(found, ChainPath):
            return found
        # Everything from this commit to the target needs what is lost; what comes before it does not.
        target = await chain.read_parent(found) if found.record.version else found
        if not target.record.after:
            raise _no_way(chain, head, found.record, lost)


async def find_anchors(chain: ChainReader, most: int, lost: Container[str] = ()) -> dict[int, Shortcut]:
    """The newest anchors beside the chain that lead to version `most` or before, by version."""
    try:
        paths = [one.path for one in await chain.bucket.list(Folder.SHORTCUTS)]
    except PermissionDenied:  # a key without list permission: the hint is all there is
        hint = await chain.read_hint()
        paths = [hint.anchor] if hint and hint.anchor else []
    dated = [(version, path) for path in paths if (version := shortcut_version(path)) is not None and version <= most]
    found: dict[int, Shortcut] = {}
    for version, path in sorted(dated, reverse=True):
        shortcut = await chain.read_shortcut(path) if version not in found else None
        if shortcut is not None and not _lost_of(shortcut, lost):
            found[version] = shortcut
        if len(found) == _ENOUGH:
            break
    return found


def anchors_of(commit: Commit, shortcuts: Iterable[Shortcut]) -> Sequence[Start]:
    """All that hold every weight of a version: shortcuts that lead to the state of its commit, or the commit itself."""
    found = [shortcut for shortcut in shortcuts if shortcut.after == commit.after]
    return [*found, commit] if commit.kind == ANCHOR else found


async def _search(
    chain: ChainReader, target: Sealed[Commit], at: Sealed[Commit] | None, lost: Container[str]
) -> ChainPath | Sealed[Commit]:
    """Back from the target. Where there is no way, the commit at which the search ended."""
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


def _no_way(chain: ChainReader, target: Sealed[Commit], blocked: Commit, lost: Container[str]) -> NoWay:
    return NoWay(
        f"{chain.bucket.url}: no anchor leads to version {target.record.version}",
        hint="publish a new anchor, or a checkpoint as a new run under another URL",
        blocked_by=_lost_of(blocked, lost),
    )


def _check_same(chain: ChainReader, at: Sealed[Commit], commit: Sealed[Commit]) -> None:
    if commit.sha256 != at.sha256:
        version = at.record.version
        raise BrokenChain(
            f"{chain.where(commit_path(version))}: is another version {version} than the one held here",
            hint="the bucket was rolled back or replaced: follow it into a new directory",
        )


def _start(commit: Commit, shortcut: Shortcut | None, lost: Container[str]) -> Start | None:
    starts = [commit] if commit.kind == BASE else anchors_of(commit, [shortcut] if shortcut else [])
    return next((start for start in starts if not _lost_of(start, lost)), None)


def _lost_of(start: Start, lost: Container[str]) -> str:
    """The first of its files that is lost; empty if none is."""
    return next((file.path for file in start.files if file.path in lost), "")
