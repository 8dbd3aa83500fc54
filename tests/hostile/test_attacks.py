"""Every attack on a bucket: a follower keeps its version and recovers, and readers name the problem or are right."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hostile.attacks import ATTACKS, BAD, HELD, NEXT, Attack, DirectoryRun, StoreRun, published_run
from hostile.limits import limited
from hostile.store_attacks import STORE_ATTACKS
from support.commands import tree
from support.followers import check, ignore
from support.memory_s3 import MemoryS3
from support.stores import use
from weightwire import Follower, open_bucket
from weightwire.bucket import Bucket, object_store
from weightwire.errors import Unavailable, WeightwireError
from weightwire.inspection import read_history, read_status, verify_run
from weightwire.system import Runtime
from weightwire.upkeep import Retention, sweep

READERS: dict[str, Callable[[Bucket], Awaitable[Any]]] = {
    "status": lambda bucket: read_status(bucket, Runtime()),
    "log": lambda bucket: read_history(bucket, 10),
    "verify": lambda bucket: verify_run(bucket, Runtime()),
    "gc": lambda bucket: sweep(bucket, Runtime(), Retention()),
}
EVERY = pytest.mark.parametrize(
    "attack", [*ATTACKS, *(pytest.param(one, marks=pytest.mark.slow) for one in STORE_ATTACKS)], ids=str
)


@pytest.fixture(autouse=True)
def _fast(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all waits short. A timeout that is not set stays so."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(object_store, "_RETRIES", {"max_retries": 0})
    monkeypatch.setattr(object_store, "_MOST_LISTED", 3000)
    if attack.waits:
        monkeypatch.setattr(object_store, "_BATCH_SECONDS", min(object_store._BATCH_SECONDS, 0.4))
        for name in ("_FOR_RECORDS", "_FOR_DATA"):
            short = {key: min(value, timedelta(seconds=0.4)) for key, value in getattr(object_store, name).items()}
            monkeypatch.setattr(object_store, name, short)


@pytest.fixture
def run(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectoryRun | StoreRun]:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"not yours")
    if not attack.in_store:
        yield DirectoryRun(tmp_path / "run")
    else:
        with MemoryS3() as store:
            use(monkeypatch, store.env)
            yield StoreRun(store)
    assert tree(tmp_path / "outside") == {"file": b"not yours"}
    assert not [path for path in tmp_path.rglob("*") if "escape" in path.name and "run" not in path.parts]


def follower_of(run: DirectoryRun | StoreRun, into: Path) -> Follower:
    return Follower(run.url, into=into, threads=1, on_event=ignore)


def once(follower: Follower, attack: Attack) -> int:
    """Looks once. Again if the timeouts are so short that a busy machine may exceed them without any attack."""
    end = time.monotonic() + 60
    while True:
        try:
            return follower.once()
        except Unavailable:
            if not attack.waits or time.monotonic() > end:
                raise


@EVERY
def test_a_follower_keeps_its_version_and_recovers(
    attack: Attack, run: DirectoryRun | StoreRun, tmp_path: Path
) -> None:
    bits = published_run()[1]
    run.show(HELD)
    with follower_of(run, tmp_path / "replica") as follower:
        assert once(follower, attack) == HELD
        run.show(BAD)
        attack.plant(run)
        with limited():
            if attack.error is None:
                assert once(follower, attack) == BAD
            else:
                with pytest.raises(attack.error, match=attack.says) as caught:
                    follower.once()
                assert caught.value.hint
                assert run.url in caught.value.message
        check(follower, bits, HELD if attack.error else BAD)
        run.show(NEXT)
        assert once(follower, attack) == NEXT
        check(follower, bits, NEXT)


@EVERY
def test_readers_of_an_attacked_bucket_fail_cleanly_or_are_right(
    attack: Attack, run: DirectoryRun | StoreRun, tmp_path: Path
) -> None:
    bits = published_run()[1]
    run.show(BAD)
    attack.plant(run)
    problems: dict[str, WeightwireError] = {}

    async def read_all() -> None:
        bucket = open_bucket(run.url)
        for name, read in READERS.items():
            try:
                found = await read(bucket)
            except WeightwireError as problem:
                problems[name] = problem
            else:
                assert name != "verify" or found.problems or found.head >= HELD, "it has verified nothing"

    with limited():
        asyncio.run(read_all())
    with follower_of(run, tmp_path / "new") as follower:
        with limited():
            try:
                follower.once()
            except WeightwireError as problem:
                problems["follow"] = problem
        if follower.version is not None:
            check(follower, bits, follower.version)
        run.show(NEXT)
        assert once(follower, attack) == NEXT
        check(follower, bits, NEXT)
    for name, raised in problems.items():
        assert raised.hint, name
        assert raised.message.isprintable(), name
