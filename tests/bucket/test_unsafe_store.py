"""A publisher rejects a store that ignores the condition of a create, unless the user passes `insist`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from faults.proxy import Proxy, mark_parts
from support.small_run import bits_of
from support.stores import Rclone, SeaweedFS, environment, use
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.chain.reader import read_run
from weightwire.errors import UnsafeBucket
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher
from weightwire.testing import in_loop

WEIGHTS = {"layer": np.arange(5000, dtype=np.uint16), "norm": np.ones(7, np.float32)}
fresh = itertools.count()


@pytest.fixture
def bucket(rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """rclone with no other fault: the proxy repairs its replies to range reads, which obstore would reject."""
    with Proxy(rclone.env["AWS_ENDPOINT_URL"]) as proxy:
        proxy.trouble("GET", "", mark_parts, float("inf"))
        use(monkeypatch, environment(proxy.endpoint, "rclone-key", "rclone-secret"))
        yield open_bucket(rclone.url(f"unsafe-{next(fresh)}"))


def test_publisher_rejects_the_store_and_writes_nothing(bucket: Bucket) -> None:
    with pytest.raises(UnsafeBucket, match="two trainers could both publish here") as caught:
        Publisher(bucket)

    assert caught.value.hint
    assert "If-None-Match" in caught.value.hint
    assert not asyncio.run(bucket.list(""))


def test_insist_publishes_in_single_writer_mode(bucket: Bucket, tmp_path: Path) -> None:
    for step in range(3):
        with Publisher(bucket, insist=True) as publisher:
            publisher.publish(WEIGHTS | {"norm": np.full(7, step, np.float32)}, step=step)

    assert asyncio.run(read_run(bucket)).mode == "single-writer"
    with Follower(bucket, into=tmp_path) as follower:
        assert follower.once() == 5
        assert bits_of(follower.checkpoint()) == bits_of(WEIGHTS | {"norm": np.full(7, 2, np.float32)})


def test_publisher_without_insist_is_rejected_by_a_single_writer_run(bucket: Bucket) -> None:
    with Publisher(bucket, insist=True) as publisher:
        publisher.publish(WEIGHTS)

    with pytest.raises(UnsafeBucket):
        Publisher(bucket)


@in_loop
async def test_safe_store_is_strict_without_insist(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, seaweedfs.env)
    for insist, mode in ((False, "strict"), (True, "single-writer")):
        bucket = open_bucket(seaweedfs.url(f"unsafe-{mode}"))
        with Publisher(bucket, insist=insist) as publisher:
            publisher.publish(WEIGHTS)
        assert (await read_run(bucket)).mode == mode
