"""Reads the commit chain from a bucket, and rejects records that contradict what is known. Reads no weights."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from weightwire.bucket import Bucket, ObjectInfo, each
from weightwire.chain.absence import denied_means_missing, get_record, is_run_missing
from weightwire.chain.record_paths import ALIVE, HEAD, RUN, commit_path, epoch_path, gc_path, heartbeat_path, number_of
from weightwire.chain.records import (
    DAMAGED,
    FENCE,
    MOST_VERSION,
    Commit,
    Epoch,
    Gc,
    HeadHint,
    Heartbeat,
    Record,
    Run,
    Sealed,
    Shortcut,
    SignOfLife,
    back_versions,
    shortcut_path,
    unseal,
)
from weightwire.chain.rules import check_first, check_follows, check_run, hop, missing_commit, rolled_back
from weightwire.chain.trust import Authority, Trust
from weightwire.errors import (
    BrokenChain,
    BucketError,
    NoBucket,
    NoRun,
    NotFound,
    PermissionDenied,
    RunError,
    Stale,
    UnsupportedFormat,
    Untrusted,
    WeightwireError,
)

__all__ = ["ChainReader", "read_run"]

_AHEAD = 16  # concurrent reads of records
_LOST_RUN = "restore run.json from a backup or a mirror of the bucket, or start a new run under another URL"
_MOST_TRIED = 256  # numbered records that are read: the rest may be junk
_KEPT = 1024  # commits that are cached
_PUSHED = "a pushed commit"

AnyRecord = TypeVar("AnyRecord", bound=Record)


async def read_run(bucket: Bucket) -> Run:
    try:
        return unseal(await get_record(bucket, RUN), Run, f"{bucket.url}/{RUN}").record
    except NoBucket:
        raise
    except NotFound as problem:
        raise _no_run(bucket) from problem
    except PermissionDenied as problem:
        if not await is_run_missing(bucket):
            raise
        raise _no_run(bucket) from problem
    except BrokenChain as problem:
        # Without run.json `weightwire verify` cannot check anything.
        raise problem.reworded(problem.message, hint=_LOST_RUN) from problem


def _no_run(bucket: Bucket) -> NoRun:
    return NoRun(
        f"{bucket.url}: nothing has been published there yet",
        hint="check the URL, or run `weightwire publish DIR URL`",
    )


class ChainReader:
    """The commits of one run. They are cached by version, so that later ones can be checked against them.

    With `trust`, the newest commits must be signed by trusted keys. Older ones are proven by the hashes in newer ones.
    Shortcuts must be signed, too.
    """

    def __init__(self, bucket: Bucket, run: Run, trust: Trust | None = None) -> None:
        self.bucket = bucket
        self.run = run
        self.authority = None if trust is None else Authority(run, trust, self.where, self.read)
        self._known: OrderedDict[int, Sealed[Commit]] = OrderedDict()
        self._run_sha256: str | None = None
        self._newest: Sealed[Commit] | None = None  # that was found trusted
        self._is_run_proven = False  # version 0 of the trusted chain names the hash of run.json

    def where(self, path: str) -> str:
        return f"{self.bucket.url}/{path}"

    # Single records

    async def read(self, version: int) -> Sealed[Commit] | None:
        """The commit of a version; None if there is none. Its place in the chain and its signature are not checked."""
        path = commit_path(version)
        data = await self._get(path)
        if data is None:
            return None
        commit = self.unseal(data, Commit, path)
        if commit.record.version != version:
            raise BrokenChain(f"{self.where(path)}: claims to be version {commit.record.version}", hint=DAMAGED)
        if version == 0:
            check_first(commit.record, await self.run_hash(), self.where(path))
        return commit

    async def run_hash(self) -> str:
        """The hash of run.json as stored. It must still be the record that this reader was made with."""
        if self._run_sha256 is None:
            sealed = self.unseal(await get_record(self.bucket, RUN), Run, RUN)
            if sealed.record != self.run:
                raise BrokenChain(f"{self.where(RUN)}: has changed since it was read", hint=_LOST_RUN)
            self._run_sha256 = sealed.sha256
        return self._run_sha256

    async def read_linked(self, version: int, sha256: str) -> Sealed[Commit]:
        """The commit of a version, which must have the hash that another commit names."""
        if version in self._known and self._known[version].sha256 == sha256:
            return self._known[version]
        commit = await self.read(version)
        if commit is None:
            raise missing_commit(self.where(commit_path(version)))
        if commit.sha256 != sha256:
            raise BrokenChain(
                f"{self.where(commit_path(version))}: its hash is not the one that later commits name", hint=DAMAGED
            )
        return self.remember(commit)

    async def read_valid(self, path: str, kind: type[AnyRecord]) -> Sealed[AnyRecord] | None:
        """The record at a path; None if it is missing or invalid. Anyone with write access may have written it."""
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
        """The back hashes of the next commit. Each is read from the commit that the previous hash names."""
        hashes: list[str] = []
        sha256 = head.record.parent
        versions = back_versions(head.record.version + 1)
        for k, version in enumerate(versions):
            hashes.append(sha256)
            if version != versions[-1]:
                sha256 = (await self.read_linked(version, sha256)).record.back[k]
        return tuple(hashes)

    async def prove(self, head: Sealed[Commit], version: int) -> str:
        """The hash of an earlier commit, proven by the back hashes of later ones. Logarithmic in the distance."""
        commit = head
        while commit.record.version - version > 1:
            commit = await self.read_linked(*hop(commit.record, version))
        return commit.sha256 if commit.record.version == version else hop(commit.record, version)[1]

    # The newest

    async def find_head(self, known: int = -1) -> int:
        """The newest version, or -1. `known` is a version that exists, or -1. Logarithmic in the distance."""
        hint = await self.read_hint()
        low, step = known, 1
        if hint is not None and hint.version > known and await self.exists(hint.version):
            low = hint.version
        while await self.exists(low + step):
            low, step = low + step, step * 2
            if low > MOST_VERSION:
                raise BucketError(
                    f"{self.bucket.url}: the store says that version {low:,} exists, which no run can have",
                    hint="the store finds objects that do not exist: check the URL and its endpoint",
                )
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if await self.exists(middle):
                low = middle
            else:
                high = middle
        return low

    async def read_hint(self) -> HeadHint | None:
        """HEAD.json; None if it is missing or invalid."""
        try:
            data = await self._get(HEAD)
            return None if data is None else self.unseal(data, HeadHint, HEAD).record
        except WeightwireError:
            return None

    async def read_head(self, known: int = -1) -> Sealed[Commit] | None:
        version = await self.find_head(known)
        head = None if version < 0 else await self.read(version)
        if head is not None and self.authority is not None:
            await self.authority.check(head)
            await self._note_newest(head)
        return head

    async def read_newest(self, most: int) -> list[Sealed[Commit]]:
        """The newest commits in ascending order, each checked against its parent."""
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
        for _, path in sorted(numbered, reverse=True)[:_MOST_TRIED]:
            sealed = await self.read_valid(path, kind)
            if sealed is not None and path_of(sealed.record) == path:
                return sealed.record
        return None

    async def read_after(self, parent: Sealed[Commit] | None, most: int = _AHEAD) -> list[Sealed[Commit]]:
        """The next commits after one, in order and at most `most`; empty if there are none yet."""
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
                if not isinstance(commit, Sealed):  # missing or unreadable: the next poll tries again
                    return await self._trusted(self._checked(parent, found))
                found.append(commit)
        return await self._trusted(self._checked(parent, found))

    async def read_pushed(self, data: bytes, held: Sealed[Commit]) -> Sealed[Commit] | None:
        """A commit that someone sent, if it is the next after `held`, or may be a later one. Otherwise None.

        The next one is judged like one from the bucket. `confirm` tells whether the bucket has it.
        """
        try:
            commit = self.unseal(data, Commit, _PUSHED)
            if commit.record.version <= held.record.version + 1:
                self.check_follows(held, commit)
                if self.authority is not None:
                    await self.authority.check(commit)
        except (RunError, UnsupportedFormat):
            return None
        return commit

    async def confirm(self, pushed: Sealed[Commit]) -> bool:
        """Whether the bucket has exactly this commit. From then on, it counts as read."""
        if await self._get(commit_path(pushed.record.version)) != pushed.data:
            return False
        await self._trusted([pushed])
        return True

    async def _trusted(self, commits: list[Sealed[Commit]]) -> list[Sealed[Commit]]:
        """The commits up to the last trusted one, which proves those before it."""
        last = len(commits)
        while last and self.authority is not None:
            try:
                await self.authority.check(commits[last - 1])
                await self._note_newest(commits[last - 1])
                break
            except Untrusted:
                last -= 1
                if last == 0:
                    raise
        return [self.remember(commit) for commit in commits[:last]]

    async def _note_newest(self, commit: Sealed[Commit]) -> None:
        """Notes a trusted commit. The first one must prove run.json, which names the keys that it was judged by."""
        await self.prove_run(commit)
        if self._newest is None or commit.record.version > self._newest.record.version:
            self._newest = commit

    async def prove_run(self, commit: Sealed[Commit]) -> None:
        """Raises unless run.json is the one that this commit, which must be trusted, builds on. Done once."""
        if not self._is_run_proven:
            await self.read_linked(0, await self.prove(commit, 0))
            self._is_run_proven = True

    async def keys_after(self, head: Sealed[Commit] | None) -> frozenset[str]:
        """The keys that may sign the next commit; empty if the run is not signed."""
        authority = self.authority or Authority(self.run, Trust(frozenset()), self.where, self.read)
        return await authority.keys_after(head.record if head else None)

    async def read_alive(self) -> SignOfLife | None:
        """The publisher's sign of life; None if there is none. With `trust`, it must be signed like a commit."""
        data = await self._get(ALIVE)
        if data is None:
            return None
        alive = self.unseal(data, SignOfLife, ALIVE)
        if self.authority is not None:
            newest = await self._check_alive(self.authority, alive)
            if newest is not None and alive.record.epoch < newest.record.epoch:
                raise Stale(
                    f"{self.where(ALIVE)}: is of a publisher that was replaced",
                    hint="wait until the new publisher shows a sign of life",
                )
        return alive.record

    async def check_not_rolled_back(self) -> None:
        """With `trust`: raises if a version is missing that a trusted sign of life names.

        Other signs of life prove nothing: the key may have been replaced since.
        """
        alive = None if self.authority is None else await self.read_valid(ALIVE, SignOfLife)
        if alive is not None and self.authority is not None:
            with suppress(Untrusted):
                await self._check_alive(self.authority, alive)

    async def _check_alive(self, authority: Authority, alive: Sealed[SignOfLife]) -> Sealed[Commit] | None:
        """Checks the signature, then that the bucket has the commit. Returns the newest commit."""
        newest = await self.read_head(self._newest.record.version if self._newest else -1)
        await authority.check_beside(alive, newest.record if newest else None, self.where(ALIVE))
        named = await self.read(alive.record.version)
        if named is None or named.sha256 != alive.record.commit:
            raise rolled_back(
                f"{self.bucket.url}: does not have version {alive.record.version}, which its publisher committed"
            )
        return newest

    def _checked(self, parent: Sealed[Commit] | None, commits: Sequence[Sealed[Commit]]) -> list[Sealed[Commit]]:
        accepted: list[Sealed[Commit]] = []
        for commit in commits:
            if parent is not None:
                try:
                    self.check_follows(parent, commit)
                except WeightwireError:
                    if accepted:  # these are valid; the next poll stops at the bad one
                        return accepted
                    raise
            accepted.append(commit)
            parent = commit
        return accepted

    async def read_parent(self, commit: Sealed[Commit]) -> Sealed[Commit]:
        """The parent of a commit, checked. Reads some earlier commits at the same time."""
        version = commit.record.version - 1
        await self._read_ahead(version)
        parent = await self.read_linked(version, commit.record.parent)
        self.check_follows(parent, commit)
        return parent

    async def read_weights_before(self, commit: Sealed[Commit]) -> Sealed[Commit] | None:
        """The newest commit before one that is not a fence; None if the run had no weights by then."""
        while commit.record.version and commit.record.before:
            commit = await self.read_parent(commit)
            if commit.record.kind != FENCE:
                return commit
        return None

    async def _read_ahead(self, version: int) -> None:
        """Caches some commits up to a version. They are checked when they are needed."""
        if version in self._known:
            return
        wanted = [v for v in range(max(0, version - _AHEAD + 1), version + 1) if v not in self._known]
        for commit in await asyncio.gather(*(self.read(v) for v in wanted), return_exceptions=True):
            if isinstance(commit, Sealed):
                self.remember(commit)

    async def read_shortcut(self, path: str) -> Shortcut | None:
        """A shortcut; None if it is missing, invalid or, with `trust`, not trusted."""
        sealed = await self.read_valid(path, Shortcut)
        if sealed is None or shortcut_path(sealed) != path or not await self.trusts(sealed):
            return None
        return sealed.record

    async def trusts(self, shortcut: Sealed[Shortcut]) -> bool:
        """Whether a key that is in force now signed it. Always true without `trust`."""
        if self.authority is None:
            return True
        newest = self._newest or await self.read_head()
        try:
            await self.authority.check_beside(shortcut, newest.record if newest else None, self.where(""))
        except Untrusted:
            return False
        return True

    async def read_heartbeat(self, path: str) -> Heartbeat | None:
        """A replica's heartbeat; None if it is missing, invalid or at the path of another replica."""
        sealed = await self.read_valid(path, Heartbeat)
        return sealed.record if sealed is not None and heartbeat_path(sealed.record.name) == path else None

    # Bytes

    async def _get(self, path: str) -> bytes | None:
        try:
            async with denied_means_missing(self.bucket, path):
                return await get_record(self.bucket, path)
        except NoBucket:
            raise
        except NotFound:
            return None

    async def exists(self, version: int) -> bool:
        """Whether there is a commit of this version."""
        path = commit_path(version)
        try:
            async with denied_means_missing(self.bucket, path):
                return await self.bucket.find(path) is not None
        except NoBucket:
            raise
        except NotFound:
            return False

    def unseal(self, data: bytes, kind: type[AnyRecord], path: str) -> Sealed[AnyRecord]:
        """Decodes a record of this run. Raises ForeignRun for another run's."""
        sealed = unseal(data, kind, self.where(path))
        check_run(sealed.record, self.run.run, self.where(path))
        return sealed
