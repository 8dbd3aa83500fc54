"""The probe accepts safe buckets and rejects unsafe ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.stores import Rclone, SeaweedFS, use
from weightwire.bucket.bucket import GET_LIMIT, Bucket
from weightwire.bucket.object_store import ObjectStoreBucket, open_object_store
from weightwire.bucket.probe import probe_bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, NotFound, PermissionDenied, Unavailable, UnsafeBucket
from weightwire.testing import in_loop


class Store(ObjectStoreBucket):
    """A memory bucket with operations that tests override."""

    def __init__(self, name: str) -> None:
        proper = open_object_store("memory", f"probe-{name}", "")
        super().__init__(proper.url, "", "memory", proper._records, proper._data)


async def check_rejected(bucket: Bucket, why: str) -> None:
    with pytest.raises(UnsafeBucket, match=why) as caught:
        await probe_bucket(bucket, "token")
    assert bucket.url in caught.value.message
    assert caught.value.hint
    assert not await bucket.list("")


# Safe buckets


@in_loop
async def test_directory_passes(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path)
    for attempt in range(10):
        await probe_bucket(bucket, f"token-{attempt}")
    assert not list(tmp_path.iterdir())


@in_loop
async def test_memory_passes() -> None:
    bucket = open_bucket("memory://probe")
    await probe_bucket(bucket, "token")
    assert not await bucket.list("")


@in_loop
async def test_seaweedfs_passes(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, seaweedfs.env)
    bucket = open_bucket(seaweedfs.url("probe"))
    await probe_bucket(bucket, "token")
    assert not await bucket.list("")


@in_loop
async def test_client_that_reports_its_own_write_as_a_conflict_passes() -> None:
    class Forgetful(Store):
        async def create(self, path: str, data: bytes) -> None:
            await super().create(path, data)
            raise AlreadyExists(path)

    await probe_bucket(Forgetful("forgetful"), "token")


@in_loop
async def test_single_writer_bucket_is_not_probed() -> None:
    class Single(Store):
        strict = False

        async def create(self, path: str, data: bytes) -> None:
            pytest.fail("probed")

    await probe_bucket(Single("single"), "token")


# Unsafe buckets


@in_loop
async def test_rclone_is_rejected(rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, rclone.env)
    await check_rejected(open_bucket(rclone.url("run")), "an existing object was created again")


@in_loop
async def test_check_then_write_is_rejected() -> None:
    all_have_looked = asyncio.Barrier(8)

    class Slow(Store):
        async def create(self, path: str, data: bytes) -> None:
            if await self.find(path) is not None:
                raise AlreadyExists(path)
            if data.startswith(b"racer"):
                await all_have_looked.wait()
            await self.put(path, data)

    await check_rejected(Slow("slow"), "8 of 8 concurrent creates of one object succeeded")


@in_loop
async def test_conflict_that_overwrites_is_rejected() -> None:
    class Liar(Store):
        async def create(self, path: str, data: bytes) -> None:
            is_there = await self.find(path) is not None
            await self.put(path, data)
            if is_there:
                raise AlreadyExists(path)

    await check_rejected(Liar("liar"), "a rejected create replaced the object")


@in_loop
async def test_store_that_keeps_a_loser_is_rejected() -> None:
    class Swapping(Store):
        async def create(self, path: str, data: bytes) -> None:
            try:
                await super().create(path, data)
            except AlreadyExists:
                if data.startswith(b"racer"):
                    await self.put(path, data)
                raise

    await check_rejected(Swapping("swapping"), "does not hold what its creator wrote")


@in_loop
async def test_store_that_loses_objects_is_rejected() -> None:
    class Blank(Store):
        async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
            raise NotFound(path)

    await check_rejected(Blank("blank"), "not found")


# Buckets that fail for other reasons


@in_loop
@pytest.mark.parametrize("error", [Unavailable, PermissionDenied])
async def test_other_errors_are_raised_unchanged(error: type[Exception]) -> None:
    class Failing(Store):
        async def create(self, path: str, data: bytes) -> None:
            if data == b"racer 5":
                raise error(path)
            await super().create(path, data)

    bucket = Failing("failing")
    with pytest.raises(error):
        await probe_bucket(bucket, "token")
    assert not await bucket.list("")


@in_loop
async def test_store_without_delete_permission_passes() -> None:
    class Keeping(Store):
        async def delete(self, path: str) -> None:
            raise PermissionDenied(path)

    await probe_bucket(Keeping("keeping"), "token")
