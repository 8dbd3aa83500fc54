"""A store that ignores the condition of a create: refused by a publisher, unless the user insists."""

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
    """One whose only fault is this: rclone's replies for parts of an object, which obstore refuses, are mended."""
    with Proxy(rclone.env["AWS_ENDPOINT_URL"]) as proxy:
        proxy.trouble("GET", "", mark_parts, float("inf"))
        use(monkeypatch, environment(proxy.endpoint, "rclone-key", "rclone-secret"))
        yield open_bucket(rclone.url(f"unsafe-{next(fresh)}"))


def test_a_publisher_refuses_it_before_it_writes_anything(bucket: Bucket) -> None:
    with pytest.raises(UnsafeBucket, match="two trainers could both publish here") as caught:
        Publisher(bucket)

    assert caught.value.hint
    assert "If-None-Match" in caught.value.hint
    assert not asyncio.run(bucket.list(""))


def test_who_insists_publishes_alone(bucket: Bucket, tmp_path: Path) -> None:
    for step in range(3):  # each takes over from the one before
        with Publisher(bucket, insist=True) as publisher:
            publisher.publish(WEIGHTS | {"norm": np.full(7, step, np.float32)}, step=step)

    assert asyncio.run(read_run(bucket)).mode == "single-writer"
    with Follower(bucket, into=tmp_path) as follower:
        assert follower.once() == 5
        assert bits_of(follower.checkpoint()) == bits_of(WEIGHTS | {"norm": np.full(7, 2, np.float32)})


def test_one_who_does_not_insist_is_refused_there_too(bucket: Bucket) -> None:
    with Publisher(bucket, insist=True) as publisher:
        publisher.publish(WEIGHTS)

    with pytest.raises(UnsafeBucket):
        Publisher(bucket)


@in_loop
async def test_a_safe_store_is_strict_unless_one_insists(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, seaweedfs.env)
    for insist, mode in ((False, "strict"), (True, "single-writer")):
        bucket = open_bucket(seaweedfs.url(f"unsafe-{mode}"))
        with Publisher(bucket, insist=insist) as publisher:
            publisher.publish(WEIGHTS)
        assert (await read_run(bucket)).mode == mode
