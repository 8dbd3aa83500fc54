"""A walk along the chain from its first version, and what leads to each version: commits, and shortcuts beside them.

Knows records only. Collects what is wrong instead of stopping at it; only the bucket itself can fail. Changes nothing.
"""

from __future__ import annotations

from weightwire.bucket import Bucket
from weightwire.chain import (
    ChainReader,
    Commit,
    Folder,
    Gc,
    Run,
    Sealed,
    Shortcut,
    back_versions,
    commit_path,
    gc_path,
    missing_commit,
    number_of,
    shortcut_path,
)
from weightwire.errors import NotFound, RunError, UnsupportedFormat
from weightwire.inspection.findings import Findings, Verification, Way

__all__ = ["ChainWalk"]

_AHEAD = 64  # commits that are asked for at the same time


class ChainWalk:
    """The chain of a run, as far as it is whole. `ways` are by version, a commit before the anchors of its version."""

    def __init__(self, bucket: Bucket, run: Run, findings: Findings) -> None:
        self.bucket, self.run, self.findings = bucket, run, findings
        self.chain = ChainReader(bucket, run)
        self.head = -1
        self.below = 0
        self.ways: list[Way] = []
        self.hashes: list[str] = []  # of the commits, by version

    def result(self) -> Verification:
        return self.findings.result(self.run.run, self.head, len(self.hashes) - 1, self.below)

    async def walk(self) -> None:
        """From the first version to the newest, or to where the chain breaks."""
        listed = [number_of(one.path) for one in await self.bucket.list(Folder.COMMITS)]
        self.head = max((number for number in listed if number is not None), default=-1)
        parent: Sealed[Commit] | None = None
        while (version := len(self.hashes)) <= self.head:
            try:
                found = await self.chain.read_after(parent, min(_AHEAD, self.head + 1 - version))
            except (RunError, UnsupportedFormat) as problem:
                self.findings.add(version, commit_path(version), problem)
                return
            if not found:
                path = commit_path(version)
                self.findings.add(version, path, missing_commit(self.chain.where(path)))
                return
            for parent in found:
                self._accept(parent)

    def _accept(self, commit: Sealed[Commit]) -> None:
        record = commit.record
        path = commit_path(record.version)
        for version, sha256 in zip(back_versions(record.version), record.back, strict=True):
            if self.hashes[version] != sha256:
                self.findings.add(record.version, path, f"names another commit of version {version} than there is")
        self.hashes.append(commit.sha256)
        self.ways.append(Way.of_commit(record))

    async def read_below(self) -> None:
        """Below which version retention may have deleted data, by now."""
        listed = [number_of(one.path) for one in await self.bucket.list(Folder.GC)]
        for number in sorted((number for number in listed if number is not None), reverse=True):
            if number <= self.below:
                return
            path = gc_path(number)
            try:
                record = self.chain.unseal(await self.bucket.get(path), Gc, path).record
            except (RunError, UnsupportedFormat) as problem:
                self.findings.add(None, path, problem)
                continue
            if record.below == number and number <= self.head:
                self.below = number
                return
            self.findings.add(None, path, f"speaks of version {record.below}")

    async def read_shortcuts(self, paths: list[str]) -> None:
        found = [await self._read_shortcut(path) for path in paths]
        self.ways += [way for way in found if way is not None]
        self.ways.sort(key=lambda way: (way.version, way.path))  # "commits/" comes before "shortcuts/"

    async def _read_shortcut(self, path: str) -> Way | None:
        try:
            sealed = self.chain.unseal(await self.bucket.get(path), Shortcut, path)
        except NotFound:
            return None  # retention was faster
        except (RunError, UnsupportedFormat) as problem:
            self.findings.add(None, path, problem)
            return None
        shortcut = sealed.record
        version = shortcut.version
        what = "says something else than its name" if shortcut_path(sealed) != path else None
        what = what or await self._contradiction(shortcut)
        if what is not None:
            self.findings.add(version, path, what)
        if what is not None or version >= len(self.hashes):
            return None
        return Way.of_shortcut(shortcut, path)

    async def _contradiction(self, shortcut: Shortcut) -> str | None:
        """Between a shortcut and the chain. Past where that breaks there is nothing to hold it against."""
        version = shortcut.version
        if version < len(self.hashes):
            same = shortcut.after == self.ways[version].after
            return None if same else "leads to another state than the commit of its version"
        if version > self.head and await self.bucket.find(commit_path(version)) is None:
            return "leads to a version that does not exist"
        return None
