"""Walks the chain from its first version, and collects the commits and shortcuts that lead to each version.

Reads records only. Collects problems instead of raising them; only errors of the bucket are raised.
"""

from __future__ import annotations

from weightwire.bucket import Bucket
from weightwire.chain import (
    ALIVE,
    ChainReader,
    Commit,
    Folder,
    Gc,
    Run,
    Sealed,
    Shortcut,
    Trust,
    back_versions,
    commit_path,
    find_or_list,
    gc_path,
    get_record,
    missing_commit,
    number_of,
    shortcut_path,
    unlisted_means_missing,
)
from weightwire.errors import BrokenChain, NotFound, RunError, UnsupportedFormat
from weightwire.inspection.findings import Findings, Verification, VersionFiles

__all__ = ["ChainWalk"]

_AHEAD = 64  # commits that are read at the same time


class ChainWalk:
    """The intact part of a chain. `files` are sorted by version, each commit before the anchors of its version."""

    def __init__(self, bucket: Bucket, run: Run, findings: Findings, trust: Trust | None = None) -> None:
        self.bucket, self.run, self.findings = bucket, run, findings
        self.chain = ChainReader(bucket, run, trust)
        self.head = -1
        self.below = 0
        self.files: list[VersionFiles] = []
        self.hashes: list[str] = []  # SHA-256 of the commits, by version

    def result(self) -> Verification:
        return self.findings.result(self.run, self.head, len(self.hashes) - 1, self.below)

    async def walk(self) -> None:
        """Walks from the first version to the newest, or to the first break."""
        listed = [number_of(one.path) for one in await self.bucket.list(Folder.COMMITS)]
        self.head = max((number for number in listed if number is not None), default=-1)
        if self.head < 0:  # a login page in place of a listing looks like an empty one
            self.head = await self.chain.find_head()
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
        try:
            await self.chain.check_not_rolled_back()
        except BrokenChain as problem:
            self.findings.add(None, ALIVE, problem)

    def _accept(self, commit: Sealed[Commit]) -> None:
        record = commit.record
        path = commit_path(record.version)
        for version, sha256 in zip(back_versions(record.version), record.back, strict=True):
            if self.hashes[version] != sha256:
                self.findings.add(record.version, path, f"its hash of commit {version} does not match that commit")
        self.hashes.append(commit.sha256)
        self.files.append(VersionFiles.of_commit(record))

    async def read_below(self) -> None:
        """Reads below which version retention may have deleted data by now."""
        listed = [number_of(one.path) for one in await self.bucket.list(Folder.GC)]
        for number in sorted((number for number in listed if number is not None), reverse=True):
            if number <= self.below:
                return
            path = gc_path(number)
            try:
                record = self.chain.unseal(await get_record(self.bucket, path), Gc, path).record
            except (RunError, UnsupportedFormat) as problem:
                self.findings.add(None, path, problem)
                continue
            if record.below == number and number <= self.head:
                self.below = number
                return
            self.findings.add(None, path, f"names version {record.below}, which does not match its path or the chain")

    async def read_shortcuts(self, paths: list[str]) -> None:
        found = [await self._read_shortcut(path) for path in paths]
        self.files += [entry for entry in found if entry is not None]
        self.files.sort(key=lambda entry: (entry.version, entry.path))  # "commits/" comes before "shortcuts/"

    async def _read_shortcut(self, path: str) -> VersionFiles | None:
        try:
            async with unlisted_means_missing(self.bucket, path):
                data = await get_record(self.bucket, path)
            sealed = self.chain.unseal(data, Shortcut, path)
        except NotFound:
            return None  # deleted by retention meanwhile
        except (RunError, UnsupportedFormat) as problem:
            self.findings.add(None, path, problem)
            return None
        shortcut = sealed.record
        version = shortcut.version
        what = "its content does not match its path" if shortcut_path(sealed) != path else None
        what = what or await self._contradiction(shortcut)
        if what is not None:
            self.findings.add(version, path, what)
        if what is not None or version >= len(self.hashes) or not await self.chain.trusts(sealed):
            return None
        return VersionFiles.of_shortcut(shortcut, path)

    async def _contradiction(self, shortcut: Shortcut) -> str | None:
        """How a shortcut contradicts the chain. Versions after a break in the chain cannot be checked."""
        version = shortcut.version
        if version < len(self.hashes):
            same = shortcut.after == self.files[version].after
            return None if same else "its state differs from that of its version's commit"
        if version > self.head and await find_or_list(self.bucket, commit_path(version)) is None:
            return "its version does not exist"
        return None
