"""The commit chain as it lies in a bucket: reads records, and lets none pass that does not fit what is known.

Shared by catchup, publisher, follower, upkeep, inspection and page. Reads records only: no weights, no deltas.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.chain.absence import denied_means_missing
from weightwire.chain.records import (
    DAMAGED,
    HEAD,
    RUN,
    Commit,
    Epoch,
    Gc,
    HeadHint,
    Heartbeat,
    Record,
    Run,
    Sealed,
    Shortcut,
    back_versions,
    commit_path,
    epoch_path,
    gc_path,
    heartbeat_path,
    number_of,
    shortcut_path,
    unseal,
)
from weightwire.chain.rules import check_first, check_follows, check_run, hop, missing_commit
from weightwire.errors import (
    BrokenChain,
    NoBucket,
    NoRun,
    NotFound,
    RunError,
    UnsupportedFormat,
    WeightwireError,
)

__all__ = ["ChainReader", "read_run"]

_AHEAD = 16  # how many records are asked for at the same time
_KEPT = 1024  # how many commits are remembered

AnyRecord = TypeVar("AnyRecord", bound=Record)


async def read_run(bucket: Bucket) -> Run:
    try:
        data = await bucket.get(RUN)
    except NoBucket:
        raise
    except NotFound as problem:
        raise NoRun(
            f"{bucket.url}: nothing has been published there yet", hint="check the URL, or start a publisher"
        ) from problem
    return unseal(data, Run, f"{bucket.url}/{RUN}").record


class ChainReader:
    """One run's commits. What was read is remembered by version, so that it can be checked against later."""

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self.bucket = bucket
        self.run = run
        self._known: OrderedDict[int, Sealed[Commit]] = OrderedDict()

    def where(self, path: str) -> str:
        return f"{self.bucket.url}/{path}"

    # Single records

    async def read(self, version: int) -> Sealed[Commit] | None:
        """The commit of a version; None where there is none. Checked for itself, not for its place in the chain."""
        path = commit_path(version)
        data = await self._get(path)
        if data is None:
            return None
        commit = self.unseal(data, Commit, path)
        if commit.record.version != version:
            raise BrokenChain(f"{self.where(path)}: says it is version {commit.record.version}", hint=DAMAGED)
        if version == 0:
            check_first(commit.record, self.where(path))
        return commit

    async def read_linked(self, version: int, sha256: str) -> Sealed[Commit]:
        """The commit of a version that another one names by its hash."""
        if version in self._known and self._known[version].sha256 == sha256:
            return self._known[version]
        commit = await self.read(version)
        if commit is None:
            raise missing_commit(self.where(commit_path(version)))
        if commit.sha256 != sha256:
            raise BrokenChain(
                f"{self.where(commit_path(version))}: is not the commit that later ones were built on", hint=DAMAGED
            )
        return self.remember(commit)

    async def read_valid(self, path: str, kind: type[AnyRecord]) -> Sealed[AnyRecord] | None:
        """The record at a path; None if there is no valid one: anyone with write access may have put anything there."""
        try:
            data = await self._get(path)
            return None if data is None else self.unseal(data, kind, path)
        except (RunError, UnsupportedFormat):
            return None

    def remember(self, commit: Sealed[Commit]) -> Sealed[Commit]:
        self._known[commit.record.version] = commit
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return commit

    def check_follows(self, parent: Sealed[Commit], commit: Sealed[Commit]) -> None:
        check_follows(parent, commit.record, self.where(commit_path(commit.record.version)))

    async def back_of(self, head: Sealed[Commit]) -> tuple[str, ...]:
        """The hashes that the next commit must carry: each is read off the commit that the one before it leads to."""
        hashes: list[str] = []
        sha256 = head.record.parent
        versions = back_versions(head.record.version + 1)
        for k, version in enumerate(versions):
            hashes.append(sha256)
            if version != versions[-1]:
                sha256 = (await self.read_linked(version, sha256)).record.back[k]
        return tuple(hashes)

    async def prove(self, head: Sealed[Commit], version: int) -> str:
        """The hash of an earlier version's commit, by what later ones say of it. Few steps, even in long chains."""
        commit = head
        while commit.record.version - version > 1:
            commit = await self.read_linked(*hop(commit.record, version))
        return commit.sha256 if commit.record.version == version else hop(commit.record, version)[1]

    # The newest

    async def find_head(self, known: int = -1) -> int:
        """The newest version, or -1. `known` is one that exists, or -1. Few requests, however far away it is."""
        hint = await self.read_hint()
        low, step = known, 1
        if hint is not None and hint.version > known and await self._exists(hint.version):
            low = hint.version
        while await self._exists(low + step):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if await self._exists(middle):
                low = middle
            else:
                high = middle
        return low

    async def read_hint(self) -> HeadHint | None:
        """HEAD.json, whatever it is worth."""
        try:
            data = await self._get(HEAD)
            return None if data is None else self.unseal(data, HeadHint, HEAD).record
        except WeightwireError:
            return None

    async def read_head(self, known: int = -1) -> Sealed[Commit] | None:
        version = await self.find_head(known)
        return None if version < 0 else await self.read(version)

    async def read_newest(self, most: int) -> list[Sealed[Commit]]:
        """The newest commits, the newest last, each checked against the one before it."""
        head = await self.read_head() if most > 0 else None
        if head is None:
            return []
        found = {head.record.version: head}

        async def read(version: int) -> None:
            commit = await self.read(version)
            if commit is None:
                raise missing_commit(self.where(commit_path(version)))
            found[version] = commit

        versions = range(max(0, head.record.version - most + 1), head.record.version + 1)
        await each(versions[:-1], _AHEAD, read)
        for version in versions[:-1]:
            self.check_follows(found[version], found[version + 1])
        return [found[version] for version in versions]

    async def newest_epoch(self, objects: Iterable[ObjectInfo]) -> Epoch | None:
        """The valid epoch record with the highest number among these objects."""
        return await self._highest(objects, Epoch, lambda record: epoch_path(record.epoch))

    async def newest_gc(self, objects: Iterable[ObjectInfo]) -> Gc | None:
        """The valid gc record with the highest number among these objects."""
        return await self._highest(objects, Gc, lambda record: gc_path(record.below))

    async def _highest(
        self, objects: Iterable[ObjectInfo], kind: type[AnyRecord], path_of: Callable[[AnyRecord], str]
    ) -> AnyRecord | None:
        numbered = [(number, one.path) for one in objects if (number := number_of(one.path)) is not None]
        for _, path in sorted(numbered, reverse=True):
            sealed = await self.read_valid(path, kind)
            if sealed is not None and path_of(sealed.record) == path:
                return sealed.record
        return None

    async def read_after(self, parent: Sealed[Commit] | None, most: int = _AHEAD) -> list[Sealed[Commit]]:
        """The commits after one, in order: some of them, or none if there are none yet."""
        version = parent.record.version if parent else -1
        first = await self.read(version + 1)
        if first is None:
            return []
        found = [first]
        while len(found) < most:
            size = min(len(found), most - len(found))
            begin = version + 1 + len(found)
            more = await asyncio.gather(*(self.read(v) for v in range(begin, begin + size)), return_exceptions=True)
            for commit in more:
                if not isinstance(commit, Sealed):  # none, or one that cannot be read: the next look will tell
                    return self._checked(parent, found)
                found.append(commit)
        return self._checked(parent, found)

    def _checked(self, parent: Sealed[Commit] | None, commits: Sequence[Sealed[Commit]]) -> list[Sealed[Commit]]:
        accepted: list[Sealed[Commit]] = []
        for commit in commits:
            if parent is not None:
                try:
                    self.check_follows(parent, commit)
                except WeightwireError:
                    if accepted:  # these are good; the next look stops at the bad one
                        return accepted
                    raise
            accepted.append(self.remember(commit))
            parent = commit
        return accepted

    async def read_parent(self, commit: Sealed[Commit]) -> Sealed[Commit]:
        """The commit before one, which must follow from it. Some more are fetched at the same time."""
        version = commit.record.version - 1
        await self._read_ahead(version)
        parent = await self.read_linked(version, commit.record.parent)
        self.check_follows(parent, commit)
        return parent

    async def _read_ahead(self, version: int) -> None:
        """Fetches some commits before a version at the same time; what they are worth is seen when they are needed."""
        if version in self._known:
            return
        wanted = [v for v in range(max(0, version - _AHEAD + 1), version + 1) if v not in self._known]
        for commit in await asyncio.gather(*(self.read(v) for v in wanted), return_exceptions=True):
            if isinstance(commit, Sealed):
                self.remember(commit)

    async def read_shortcut(self, path: str) -> Shortcut | None:
        """A shortcut; None if it cannot be read, which is no reason to stop."""
        sealed = await self.read_valid(path, Shortcut)
        return sealed.record if sealed is not None and shortcut_path(sealed) == path else None

    async def read_heartbeat(self, path: str) -> Heartbeat | None:
        """A replica's heartbeat; None if it cannot be read, or lies where another replica's belongs."""
        sealed = await self.read_valid(path, Heartbeat)
        return sealed.record if sealed is not None and heartbeat_path(sealed.record.name) == path else None

    # Bytes

    async def _get(self, path: str) -> bytes | None:
        try:
            async with denied_means_missing(self.bucket, path):
                return await self.bucket.get(path)
        except NoBucket:
            raise
        except NotFound:
            return None

    async def _exists(self, version: int) -> bool:
        path = commit_path(version)
        try:
            async with denied_means_missing(self.bucket, path):
                return await self.bucket.find(path) is not None
        except NoBucket:
            raise
        except NotFound:
            return False

    def unseal(self, data: bytes, kind: type[AnyRecord], path: str) -> Sealed[AnyRecord]:
        """A record that was read at a path; it must be one of this run."""
        sealed = unseal(data, kind, self.where(path))
        check_run(sealed.record, self.run.run, self.where(path))
        return sealed
