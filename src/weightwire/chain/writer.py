"""Writes the commit chain for one publisher: claims an epoch, sets a fence, and makes commits.

Handles lost replies and fencing. Uploads no data.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weightwire.bucket import Bucket
from weightwire.chain.absence import get_record
from weightwire.chain.keys import KEY_VARIABLE, PrivateKey, PublicKey
from weightwire.chain.reader import ChainReader
from weightwire.chain.record_paths import ALIVE, HEAD, RUN, Folder, commit_path, epoch_path
from weightwire.chain.records import (
    DAMAGED,
    FENCE,
    Commit,
    Epoch,
    HeadHint,
    Run,
    Sealed,
    SignOfLife,
    record_limit,
    seal,
    unseal,
)
from weightwire.chain.rules import check_first, check_run
from weightwire.chain.trust import Trust
from weightwire.errors import (
    AlreadyExists,
    BrokenChain,
    BucketError,
    CheckpointError,
    Fenced,
    NotFound,
    NotPublished,
    PermissionDenied,
    Untrusted,
    WeightwireError,
)
from weightwire.system import Runtime

__all__ = ["ChainWriter", "Signer", "backoff", "check_signer", "create_until_taken"]

Warn = Callable[[str], None]

_MOST_CONTRADICTIONS = 20  # an object that exists and is not found: about four minutes


@dataclass(frozen=True)
class Signer:
    """The key of a publisher, and the other keys that it trusts: it must not vouch for a stranger's history."""

    key: PrivateKey
    trusted: frozenset[str] = frozenset()

    @property
    def trust(self) -> Trust:
        return Trust(self.trusted | {self.key.public.hex})


def check_signer(url: str, run: Run, signer: Signer | None) -> None:
    """Checks that a publisher has a key if the run is signed, and only then."""
    if run.keys and signer is None:
        raise Untrusted(
            f"{url}: this run is signed, and this publisher has no key",
            hint=f"pass its key: --key FILE, key= in Python, or {KEY_VARIABLE}",
        )
    if not run.keys and signer is not None:
        raise Untrusted(
            f"{url}: this run is not signed, so its history cannot be trusted",
            hint="start a new run under another URL, or publish without a key",
        )


def backoff(runtime: Runtime, tries: int) -> float:
    """Seconds to wait after `tries` failures: exponential with jitter, capped at about 15."""
    return min(15.0, 0.1 * 2.0 ** min(tries, 10)) * (0.5 + runtime.random.random())


async def create_until_taken(
    bucket: Bucket, path: str, data: bytes, runtime: Runtime, warn: Warn, tries: int | None = None
) -> bytes:
    """Creates an object and returns what is stored there in the end, by this or another writer.

    A request that seems to fail may still arrive, so the same bytes are sent until the path is taken. Pass `tries` to
    give up after so many failures, only if nothing depends on the outcome.
    """
    failed = contradictions = 0

    async def wait_after(problem: BucketError) -> None:
        nonlocal failed
        failed += 1
        if tries is not None and failed >= tries:
            raise problem
        warn(f"{path}: {problem.message}; trying again")
        await asyncio.sleep(backoff(runtime, failed))

    while True:
        exists = False
        try:
            await bucket.create(path, data)
            return data
        except AlreadyExists:
            exists = True  # by another writer, or by this one if its reply was lost
        except BucketError as problem:
            if tries is not None and isinstance(problem, PermissionDenied):
                raise
            await wait_after(problem)
        try:
            return await get_record(bucket, path)
        except NotFound as problem:
            if exists:  # a store that contradicts itself, or something else has this name
                contradictions += 1
                if contradictions == _MOST_CONTRADICTIONS:
                    raise BrokenChain(f"{bucket.url}/{path}: exists, but cannot be read", hint=DAMAGED) from problem
                await wait_after(problem)
        except BucketError as problem:
            await wait_after(problem)


async def begin_run(bucket: Bucket, run: Run, runtime: Runtime, warn: Warn) -> Run:
    """Creates run.json unless it exists. Returns the stored one."""
    mine = msgspec.json.encode(run)
    limit = record_limit(RUN)
    if len(mine) > limit:
        raise CheckpointError(
            f"{bucket.url}/{RUN}: {len(run.tensors):,} tensors need a record of more than {limit:,} bytes, the limit",
            hint="publish fewer tensors, or shorter names",
        )
    data = await create_until_taken(bucket, RUN, mine, runtime, warn, tries=5)
    return unseal(data, Run, f"{bucket.url}/{RUN}").record


class ChainWriter:
    """Call `take_over` first. From then on every commit is the next version, or this publisher is fenced off.

    With a `signer`, every commit is signed, and it continues only what the signer trusts.
    """

    def __init__(self, bucket: Bucket, run: Run, runtime: Runtime, warn: Warn, signer: Signer | None = None) -> None:
        self.bucket = bucket
        self.chain = ChainReader(bucket, run, signer.trust if signer else None)
        self.run = run
        self.epoch = 0
        self.head: Sealed[Commit] | None = None
        self._runtime = runtime
        self._warn = warn
        self._key = signer.key if signer else None

    @property
    def next_version(self) -> int:
        return self.head.record.version + 1 if self.head else 0

    async def take_over(self, keys: Sequence[PublicKey] = ()) -> None:
        """Claims the next epoch and fences off the previous publisher. `keys` replace those of the run from then on."""
        await self.chain.check_not_rolled_back()
        before = await self.chain.read_head()
        await self._check_may_sign(before)  # before the claim: a refused publisher must leave no trace
        self.epoch = await self._claim_epoch(before)
        head = await self.chain.read_head()
        self.head = None if head is None else self.chain.remember(head)
        while True:
            self._check_not_replaced(self.head)
            await self._check_may_sign(self.head)
            fence = await self.prepare(kind=FENCE, keys=tuple(key.hex for key in keys))
            path = commit_path(fence.record.version)
            # Giving up is safe: a fence that arrives late belongs to an unused epoch.
            data = await create_until_taken(self.bucket, path, fence.data, self._runtime, self._warn, tries=5)
            taken = unseal(data, Commit, self.chain.where(path))
            if self.head is not None:
                self.chain.check_follows(self.head, taken)
            else:
                check_run(taken.record, self.run.run, self.chain.where(path))
                check_first(taken.record, await self.chain.run_hash(), self.chain.where(path))
            if self.chain.authority is not None:
                await self.chain.authority.check(taken)
            self.head = self.chain.remember(taken)
            if data == fence.data:
                return

    async def prepare(self, **fields: Any) -> Sealed[Commit]:
        """Builds the next commit without sending it."""
        head = self.head
        commit = seal(
            Commit(
                run=self.run.run,
                version=self.next_version,
                epoch=self.epoch,
                write_id=self._runtime.token(),
                parent=head.sha256 if head else await self.chain.run_hash(),
                back=await self.chain.back_of(head) if head else (),
                time=self._runtime.time(),
                keys_from=head.record.next_keys_from if head else None,
                **({"before": head.record.after, "after": head.record.after} if head else {}) | fields,
            ),
            self._key,
        )
        # Decode it as a reader would: an unreadable commit would end the run.
        limit = record_limit(commit_path(commit.record.version))
        if len(commit.data) > limit:
            raise NotPublished(
                f"version {commit.record.version}: its commit has more than {limit:,} bytes, the limit",
                hint="pass fewer metrics",
            )
        unseal(commit.data, Commit, self.chain.where(commit_path(commit.record.version)))
        return commit

    async def send(self, commit: Sealed[Commit]) -> Sealed[Commit]:
        """Commits the next version, retrying without limit. Raises Fenced if another publisher was first."""
        path = commit_path(commit.record.version)
        try:
            data = await create_until_taken(self.bucket, path, commit.data, self._runtime, self._warn)
        except BrokenChain:
            data = b""  # too large to be a commit, but it has taken the place
        if data != commit.data:
            raise await self._fenced(data, path)
        self.head = self.chain.remember(commit)
        return commit

    async def show_alive(self) -> None:
        """Writes a sign of life, if this publisher signs. Best effort."""
        if self.head is None or self._key is None:
            return
        try:
            if await self.chain.exists(self.next_version):
                return  # another publisher has taken over
            alive = SignOfLife(
                run=self.run.run,
                epoch=self.epoch,
                version=self.head.record.version,
                commit=self.head.sha256,
                time=self._runtime.time(),
            )
            await self.bucket.put(ALIVE, seal(alive, self._key).data)
        except BucketError as problem:
            self._warn(f"{ALIVE}: {problem.message}")

    async def hint(self, anchor: str) -> None:
        """Writes HEAD.json, a hint for late joiners. Best effort."""
        if self.head is None:
            return
        head = HeadHint(run=self.run.run, version=self.head.record.version, anchor=anchor, time=self._runtime.time())
        try:
            await self.bucket.put(HEAD, seal(head).data)
        except BucketError as problem:
            self._warn(f"{HEAD}: {problem.message}")

    async def _check_may_sign(self, head: Sealed[Commit] | None) -> None:
        if self.chain.authority is not None and self._key is not None:
            await self.chain.authority.check_may_sign(self._key.public, head.record if head else None)

    async def _claim_epoch(self, head: Sealed[Commit] | None) -> int:
        taken = [int(one.path[7:15]) for one in await self.bucket.list(Folder.EPOCHS) if one.path[7:15].isdecimal()]
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
                hint="only one publisher may write to a run: stop one of the two",
            )

    async def _fenced(self, data: bytes, path: str) -> Fenced:
        who = "another writer"
        try:
            epoch = unseal(data, Commit, self.chain.where(path)).record.epoch
            who = f"another publisher (epoch {epoch})"
            claim = await get_record(self.bucket, epoch_path(epoch))
            who = f"another publisher (epoch {epoch}, on {unseal(claim, Epoch, epoch_path(epoch)).record.host})"
        except WeightwireError:
            pass  # the message is less precise
        return Fenced(
            f"{self.chain.where(path)}: {who} has taken over this run from epoch {self.epoch}",
            hint="only one publisher may write to a run: stop the other one and restart this one, or use another URL",
        )
