"""The contents of a run, read from the bucket alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from weightwire import State, digest
from weightwire.bucket.bucket import Bucket
from weightwire.catchup.fetch import Fetcher
from weightwire.catchup.plan import plan
from weightwire.catchup.restore import restore_weights
from weightwire.chain.reader import ChainReader, read_run
from weightwire.chain.records import Commit, Run, Sealed
from weightwire.publisher.host_copies import HostCopies
from weightwire.system.runtime import Runtime
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Weights

__all__ = ["commits_in", "run_in", "version_in"]


def run_in(bucket: Bucket) -> Run:
    return asyncio.run(read_run(bucket))


def commits_in(bucket: Bucket) -> list[Commit]:
    """The whole chain, checked as a follower does."""
    return [commit.record for commit in asyncio.run(_commits(bucket))]


def version_in(bucket: Bucket, version: int | None = None, base: Mapping[str, Any] | None = None) -> State:
    """The state of a version (default: the newest), from a full digest of its weights."""
    weights = asyncio.run(_restored(bucket, version, base))
    return digest(weights)


async def _commits(bucket: Bucket) -> list[Sealed[Commit]]:
    chain = ChainReader(bucket, await read_run(bucket))
    found: list[Sealed[Commit]] = []
    while more := await chain.read_after(found[-1] if found else None):
        found += more
    return found


async def _restored(bucket: Bucket, version: int | None, base: Mapping[str, Any] | None) -> Weights:
    run = await read_run(bucket)
    commits = await _commits(bucket)
    path = await plan(ChainReader(bucket, run), commits[-1 if version is None else version])
    room: HostCopies[None] = HostCopies(run.schema, single=True)
    given = None if base is None else read_weights(base)
    state = await restore_weights(path, Fetcher(bucket, Runtime()), room.published, Runtime(), base=given)
    assert state == digest(room.published)
    return room.published
