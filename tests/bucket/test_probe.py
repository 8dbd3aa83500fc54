"""The probe: which buckets pass, and which are found out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.stores import Rclone, SeaweedFS, use
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.object_store import ObjectStoreBucket, open_object_store
from weightwire.bucket.probe import probe_bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, NotFound, PermissionDenied, Unavailable, UnsafeBucket
from weightwire.testing import in_loop


class Store(ObjectStoreBucket):
    """Memory with manners that tests can spoil."""

    def __init__(self, name: str) -> None:
        proper = open_object_store("memory", f"probe-{name}", "")
        super().__init__(proper.url, "", "memory", proper._records, proper._data)


async def refused(bucket: Bucket, why: str) -> None:
    with pytest.raises(UnsafeBucket, match=why) as caught:
        await probe_bucket(bucket, "token")
    assert bucket.url in caught.value.message
    assert caught.value.hint
    assert not await bucket.list("")


# Those that pass


@in_loop
async def test_a_directory_passes(tmp_path: Path) -> None:
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
async def test_clients_that_report_their_own_write_as_a_conflict_pass() -> None:
    class Forgetful(Store):
        async def create(self, path: str, data: bytes) -> None:
            await super().create(path, data)
            raise AlreadyExists(path)

    await probe_bucket(Forgetful("forgetful"), "token")


@in_loop
async def test_a_single_writer_is_not_asked() -> None:
    class Single(Store):
        strict = False

        async def create(self, path: str, data: bytes) -> None:
            pytest.fail("it was")

    await probe_bucket(Single("single"), "token")


# Those that do not


@in_loop
async def test_rclone_is_refused(rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, rclone.env)
    await refused(open_bucket(rclone.url("run")), "an object that was there was created again")


@in_loop
async def test_who_looks_first_and_writes_then_is_refused() -> None:
    class Slow(Store):
        async def create(self, path: str, data: bytes) -> None:
            if await self.find(path) is not None:
                raise AlreadyExists(path)
            await asyncio.sleep(0.01)
            await self.put(path, data)

    await refused(Slow("slow"), "8 of 8 who created an object at the same time")


@in_loop
async def test_who_replaces_what_he_refuses_is_refused() -> None:
    class Liar(Store):
        async def create(self, path: str, data: bytes) -> None:
            is_there = await self.find(path) is not None
            await self.put(path, data)
            if is_there:
                raise AlreadyExists(path)

    await refused(Liar("liar"), "has replaced an object")


@in_loop
async def test_who_keeps_another_than_the_winner_is_refused() -> None:
    class Swapping(Store):
        async def create(self, path: str, data: bytes) -> None:
            try:
                await super().create(path, data)
            except AlreadyExists:
                if data.startswith(b"racer"):
                    await self.put(path, data)
                raise

    await refused(Swapping("swapping"), "does not hold what its creator wrote")


@in_loop
async def test_who_forgets_is_refused() -> None:
    class Blank(Store):
        async def get(self, path: str) -> bytes:
            raise NotFound(path)

    await refused(Blank("blank"), "is not there")


# Those that cannot be asked


@in_loop
@pytest.mark.parametrize("error", [Unavailable, PermissionDenied])
async def test_what_cannot_be_asked_is_not_called_unsafe(error: type[Exception]) -> None:
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
async def test_who_may_not_delete_is_not_unsafe() -> None:
    class Keeping(Store):
        async def delete(self, path: str) -> None:
            raise PermissionDenied(path)

    await probe_bucket(Keeping("keeping"), "token")
