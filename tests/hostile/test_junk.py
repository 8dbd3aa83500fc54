"""Junk under the prefix of a run, as much as anyone likes to write: readers stay right, and their requests are few."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hostile.attacks import BAD, NEXT, DirectoryRun, objects_of, published_run
from hostile.limits import limited
from support.failing_bucket import Troubled, in_memory
from support.followers import Trainer, check, ignore, put_back
from support.small_run import bits_of
from weightwire import Follower, open_bucket
from weightwire.bucket import Bucket, ObjectInfo
from weightwire.bucket.bucket import GET_LIMIT
from weightwire.inspection import read_history, read_status
from weightwire.page.run_reader import RunReader
from weightwire.system import Runtime

COUNT, FEW = 20_000, 5_000
NAMES = {
    "shortcuts": f"shortcuts/{BAD}/anchor-%016x.json",
    "epochs": "epochs/9%07d.json",
    "gc records": "gc/%020d.json",
    "anchors": f"anchors/{BAD}/e1-r%d-0123456789abcdef.safetensors",
    "deltas": "deltas/%d/junk",
    "other objects": "other/%d",
}
READERS: list[Callable[[Bucket], Awaitable[Any]]] = [
    lambda bucket: read_status(bucket, Runtime()),
    lambda bucket: read_history(bucket, 10),
    lambda bucket: RunReader(bucket, Runtime()).look(),
]


class Littered(Troubled):
    """Listings show junk as well, and all of it can be read."""

    junk = ""

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        found = [*await super().list(prefix)]
        if self.junk.startswith(prefix):
            found += [ObjectInfo(self.junk % number, 2, 0.0) for number in range(COUNT)]
        return sorted(found, key=lambda one: one.path)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        folder = self.junk.partition("/")[0]
        is_junk = path.startswith(f"{folder}/") and path not in objects_of(NEXT)
        self.asked.append(("get", path))
        return b"{}" if is_junk else await self.inner.get(path, limit)


@pytest.fixture
def bucket() -> Littered:
    bucket = Littered(in_memory().inner)
    put_back(bucket, objects_of(NEXT))
    return bucket


@pytest.mark.parametrize("name", NAMES)
def test_junk_costs_readers_a_bounded_number_of_requests(bucket: Littered, tmp_path: Path, name: str) -> None:
    bucket.junk = NAMES[name]
    with limited():
        for read in READERS:
            bucket.asked.clear()
            asyncio.run(read(bucket))  # type: ignore[arg-type]
            assert len(bucket.asked) < FEW
        bucket.asked.clear()
        with Follower(bucket, into=tmp_path / "replica", threads=1, on_event=ignore) as follower:
            assert follower.once() == NEXT
            check(follower, published_run()[1], NEXT)
        assert len(bucket.asked) < FEW


@pytest.mark.parametrize("name", ["epochs", "shortcuts"])
def test_a_publisher_takes_a_littered_run_over(bucket: Littered, tmp_path: Path, name: str) -> None:
    bucket.junk = NAMES[name]
    trainer = Trainer(bucket)
    trainer.weights |= {name: trainer.weights["norm"].copy() for name in published_run()[1][NEXT].keys() - {"embed"}}
    with limited():
        version = trainer.publish()
        trainer.close()
    assert len(bucket.asked) < FEW
    bucket.junk = ""
    with Follower(bucket, into=tmp_path / "replica", threads=1, on_event=ignore) as follower:
        assert follower.once() == version
        assert bits_of(follower.replica.weights) == trainer.bits[version]


@pytest.mark.slow
def test_a_directory_with_100_000_junk_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    run = DirectoryRun(tmp_path / "run")
    run.show(NEXT)
    for name in ("shortcuts", "epochs", "gc records", "other objects"):
        (run.root / (NAMES[name] % 0)).parent.mkdir(parents=True, exist_ok=True)
        for number in range(100, 25_100):
            os.mknod(f"{run.root}/{NAMES[name] % number}")
    with limited(180), Follower(run.root, into=tmp_path / "replica", threads=1, on_event=ignore) as follower:
        assert follower.once() == NEXT
        check(follower, published_run()[1], NEXT)
        found = asyncio.run(read_status(open_bucket(run.root), Runtime()))
    assert found.head is not None
    assert found.head.version == NEXT
