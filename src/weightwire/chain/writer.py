"""One publisher's hold on a run: the epoch it claimed, the fence it set, the commits it makes.

Knows records and the rules of writing them: lost replies, fencing. Knows no weights, and uploads no data.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from typing import Any

import msgspec

from weightwire.bucket import Bucket
from weightwire.chain.reader import ChainReader
from weightwire.chain.records import (
    FENCE,
    HEAD,
    RUN,
    Commit,
    Epoch,
    Folder,
    HeadHint,
    Run,
    Sealed,
    commit_path,
    epoch_path,
    seal,
    unseal,
)
from weightwire.chain.rules import check_first, check_run
from weightwire.errors import AlreadyExists, BucketError, Fenced, NotFound, PermissionDenied, WeightwireError
from weightwire.system import Runtime

__all__ = ["ChainWriter", "backoff", "create_until_taken"]

Warn = Callable[[str], None]


def backoff(runtime: Runtime, tries: int) -> float:
    """Seconds to wait after so many failures: longer each time up to 15, and never the same for two."""
    return min(15.0, 0.1 * 2.0 ** min(tries, 10)) * (0.5 + runtime.random.random())


async def create_until_taken(
    bucket: Bucket, path: str, data: bytes, runtime: Runtime, warn: Warn, tries: int | None = None
) -> bytes:
    """Creates an object, and makes sure of what came of it: returns what lies there in the end.

    A create once sent may still arrive, so the same bytes are sent again until the place is taken, by them or by
    others. Only where nothing depends on it may one give up, after so many `tries`.
    """
    failed = 0
    while True:
        try:
            await bucket.create(path, data)
            return data
        except AlreadyExists:
            pass  # another's, or one's own whose reply was lost
        except BucketError as problem:
            failed += 1
            if tries is not None and (failed >= tries or isinstance(problem, PermissionDenied)):
                raise
            warn(f"{path}: {problem.message}; trying again")
            await asyncio.sleep(backoff(runtime, failed))
        try:
            return await bucket.get(path)
        except NotFound:
            continue
        except BucketError as problem:
            failed += 1
            if tries is not None and failed >= tries:
                raise
            warn(f"{path}: {problem.message}; trying again")
            await asyncio.sleep(backoff(runtime, failed))


async def begin_run(bucket: Bucket, run: Run, runtime: Runtime, warn: Warn) -> Run:
    """Creates run.json, unless there is one; returns the one that counts."""
    data = await create_until_taken(bucket, RUN, msgspec.json.encode(run), runtime, warn, tries=5)
    return unseal(data, Run, f"{bucket.url}/{RUN}").record


class ChainWriter:
    """Made by `take_over`; from then on every commit is the next one, or this publisher is fenced off."""

    def __init__(self, bucket: Bucket, run: Run, runtime: Runtime, warn: Warn) -> None:
        self.bucket = bucket
        self.chain = ChainReader(bucket, run)
        self.run = run
        self.epoch = 0
        self.head: Sealed[Commit] | None = None
        self._runtime = runtime
        self._warn = warn

    @property
    def next_version(self) -> int:
        return self.head.record.version + 1 if self.head else 0

    async def take_over(self) -> None:
        """Claims the next epoch, and fences off whoever published before."""
        self.epoch = await self._claim_epoch()
        self.head = await self.chain.read_head()
        while True:
            self._check_not_replaced(self.head)
            fence = await self.prepare(kind=FENCE)
            path = commit_path(fence.record.version)
            # It may be given up: a fence that arrives late is one of an epoch that nobody publishes in.
            data = await create_until_taken(self.bucket, path, fence.data, self._runtime, self._warn, tries=5)
            taken = unseal(data, Commit, self.chain.where(path))
            if self.head is not None:
                self.chain.check_follows(self.head, taken)
            else:
                check_run(taken.record, self.run.run, self.chain.where(path))
                check_first(taken.record, self.chain.where(path))
            self.head = self.chain.remember(taken)
            if data == fence.data:
                return

    async def prepare(self, **fields: Any) -> Sealed[Commit]:
        """The next commit, not yet sent: nothing depends on it so far."""
        head = self.head
        commit = seal(
            Commit(
                run=self.run.run,
                version=self.next_version,
                epoch=self.epoch,
                write_id=self._runtime.token(),
                parent=head.sha256 if head else "",
                back=await self.chain.back_of(head) if head else (),
                time=self._runtime.time(),
                **({"before": head.record.after, "after": head.record.after} if head else {}) | fields,
            )
        )
        # As a reader would: a commit that nobody can read would end the run.
        unseal(commit.data, Commit, self.chain.where(commit_path(commit.record.version)))
        return commit

    async def send(self, commit: Sealed[Commit]) -> Sealed[Commit]:
        """Makes the next version exist, however long it takes. Raises Fenced if another publisher was there first."""
        path = commit_path(commit.record.version)
        data = await create_until_taken(self.bucket, path, commit.data, self._runtime, self._warn)
        if data != commit.data:
            raise await self._fenced(data, path)
        self.head = self.chain.remember(commit)
        return commit

    async def hint(self, anchor: str) -> None:
        """HEAD.json, for those who come from nothing. Nobody relies on it."""
        if self.head is None:
            return
        head = HeadHint(run=self.run.run, version=self.head.record.version, anchor=anchor, time=self._runtime.time())
        try:
            await self.bucket.put(HEAD, seal(head).data)
        except BucketError as problem:
            self._warn(f"{HEAD}: {problem.message}")

    async def _claim_epoch(self) -> int:
        taken = [int(one.path[7:15]) for one in await self.bucket.list(Folder.EPOCHS) if one.path[7:15].isdecimal()]
        head = await self.chain.read_head()
        number = max([*taken, head.record.epoch if head else 0])
        while True:
            number += 1
            mine = Epoch(
                run=self.run.run,
                epoch=number,
                write_id=self._runtime.token(),
                time=self._runtime.time(),
                host=platform.node(),
            )
            path = epoch_path(number)
            data = await create_until_taken(self.bucket, path, seal(mine).data, self._runtime, self._warn, tries=5)
            if unseal(data, Epoch, self.chain.where(path)).record.write_id == mine.write_id:
                return number

    def _check_not_replaced(self, head: Sealed[Commit] | None) -> None:
        if head is not None and head.record.epoch >= self.epoch:
            raise Fenced(
                f"{self.bucket.url}: another publisher (epoch {head.record.epoch}) started at the same time",
                hint="only one publisher may write a run: stop one of the two",
            )

    async def _fenced(self, data: bytes, path: str) -> Fenced:
        who = "something else"
        try:
            epoch = unseal(data, Commit, self.chain.where(path)).record.epoch
            who = f"another publisher (epoch {epoch})"
            claim = await self.bucket.get(epoch_path(epoch))
            who = f"another publisher (epoch {epoch}, on {unseal(claim, Epoch, epoch_path(epoch)).record.host})"
        except WeightwireError:
            pass  # it would only have been nice to know
        return Fenced(
            f"{self.chain.where(path)}: {who} has taken over this run from epoch {self.epoch}",
            hint="only one publisher may write a run: stop this one, or give it a URL of its own",
        )
