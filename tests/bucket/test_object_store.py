"""Object stores: the contract, in memory and on SeaweedFS, and the errors."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import obstore
import pytest

from support.stores import NOWHERE, Lossy, SeaweedFS, environment, running, use
from weightwire.bucket import object_store
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, BucketError, NoBucket, NotFound, PermissionDenied, TooLarge, Unavailable
from weightwire.testing import BucketContract, Opener, in_loop

fresh = itertools.count()


class TestMemory(BucketContract):
    @pytest.fixture
    def opener(self) -> Opener:
        url = f"memory://contract-{next(fresh)}/some/prefix"
        return lambda: open_bucket(url)


class TestSeaweedFS(BucketContract):
    # A losing create takes a second or more there.
    races = 1

    @pytest.fixture
    def opener(self, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Opener:
        use(monkeypatch, seaweedfs.env)
        url = seaweedfs.url(f"contract-{next(fresh)}/run")
        return lambda: open_bucket(url)


@pytest.fixture
def bucket(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    use(monkeypatch, seaweedfs.env)
    return open_bucket(seaweedfs.url(f"objects-{next(fresh)}"))


async def all_fail(bucket: Bucket, error: type[BucketError], *, but: str = "") -> BucketError:
    """Every operation raises this error, with the object's name and without secrets. Returns the last error."""
    memory = memoryview(bytearray(20_000_000))
    verbs: dict[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: bucket.get("a"),
        "read_into": lambda: bucket.read_into("a", memory),
        "find": lambda: bucket.find("a"),
        "list": lambda: bucket.list("a/"),
        "create": lambda: bucket.create("a", b"1"),
        "put": lambda: bucket.put("a", b"1"),
        "put in parts": lambda: bucket.put("a", bytes(20_000_000)),
        "delete": lambda: bucket.delete("a"),
    }
    problem = None
    for name, verb in verbs.items():
        if name in but:
            continue
        with pytest.raises(error) as caught:
            await verb()
        problem = caught.value
        assert type(problem) is error, name
        assert f"{bucket.url}/a" in problem.message
        assert problem.hint
        assert_harmless(problem)
    assert problem is not None
    return problem


def assert_harmless(problem: BaseException) -> None:
    """One line and a hint, without secrets, even in a traceback."""
    assert len(str(problem).splitlines()) == 2
    assert len(str(problem)) < 600
    text = "".join(traceback.format_exception(problem))
    assert "-secret" not in text
    assert "Signature=" not in text
    assert "Debug source" not in text


# Credentials


@in_loop
async def test_wrong_secret_is_permission_denied(
    seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, environment(seaweedfs.endpoint, "admin-key", "wrong-secret"))

    problem = await all_fail(open_bucket(bucket.url), PermissionDenied)

    assert problem.hint
    assert "AWS_SECRET_ACCESS_KEY" in problem.hint
    with pytest.raises(PermissionDenied, match="SignatureDoesNotMatch, The request signature"):
        await open_bucket(bucket.url).get("a")


@in_loop
async def test_unknown_key_is_permission_denied(
    seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, environment(seaweedfs.endpoint, "nobody-key", "nobody-secret"))

    await all_fail(open_bucket(bucket.url), PermissionDenied)


@in_loop
async def test_read_only_key_can_read_and_list(
    seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.put("a", bytes(20_000_000))
    use(monkeypatch, seaweedfs.env_of("reader"))
    reader = open_bucket(bucket.url)

    assert await reader.get("a") == bytes(20_000_000)
    assert len(await reader.list("")) == 1
    with pytest.raises(NotFound):
        await reader.get("b")
    await all_fail(reader, PermissionDenied, but="get read_into find list")


@in_loop
async def test_key_without_list_permission_can_read(
    seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.put("a", b"1")
    use(monkeypatch, seaweedfs.env_of("blind"))
    blind = open_bucket(bucket.url)

    assert await blind.get("a") == b"1"
    with pytest.raises(PermissionDenied, match="s3:ListBucket"):
        await blind.list("")


@in_loop
async def test_missing_credentials_are_permission_denied(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # The metadata address of a cloud machine. Nothing listens there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254:1")
    monkeypatch.setattr(object_store, "_RETRIES", {"max_retries": 0})
    monkeypatch.setattr(object_store, "_FOR_RECORDS", {"connect_timeout": timedelta(milliseconds=200)})

    with pytest.raises(PermissionDenied, match="no credentials found") as caught:
        await open_bucket(bucket.url).get("a")
    assert caught.value.hint
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert "boto3" in caught.value.hint


# Buckets


@in_loop
async def test_missing_bucket_is_no_bucket(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, seaweedfs.env)
    missing = open_bucket("s3://no-such-bucket/run")

    # A reply to HEAD or DELETE has no body, so it cannot tell a missing bucket from a missing object.
    assert await missing.find("a") is None
    await missing.delete("a")
    problem = await all_fail(missing, NoBucket, but="find delete")
    assert problem.hint
    assert "create the bucket" in problem.hint
    assert "NoSuchBucket" in problem.message


@in_loop
async def test_prefixes_are_separate(seaweedfs: SeaweedFS, bucket: Bucket) -> None:
    inner, beside = open_bucket(f"{bucket.url}/a"), open_bucket(f"{bucket.url}-2")
    await inner.put("b", b"1")
    await beside.put("c", b"2")

    assert [entry.path for entry in await bucket.list("")] == ["a/b"]
    assert [entry.path for entry in await inner.list("")] == ["b"]
    assert await bucket.get("a/b") == b"1"
    whole = [entry.path for entry in await open_bucket(f"s3://{seaweedfs.bucket}").list("")]
    assert f"{bucket.url.rpartition('/')[2]}/a/b" in whole


@in_loop
async def test_memory_buckets_of_one_name_share_objects() -> None:
    await open_bucket("memory://shared/a").put("b", b"1")

    assert await open_bucket("memory://shared").get("a/b") == b"1"
    assert await open_bucket("memory://other").find("a/b") is None


@in_loop
async def test_list_reads_all_pages(bucket: Bucket) -> None:
    names = [f"commits/{number:020}.json" for number in range(1001)]
    await asyncio.gather(*(bucket.put(name, b"") for name in names))

    assert [entry.path for entry in await bucket.list("commits/")] == names


# The network


@in_loop
async def test_refused_connection_is_unavailable(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment(NOWHERE, "admin-key", "admin-secret"))
    began = time.monotonic()

    problem = await all_fail(open_bucket(bucket.url), Unavailable)

    assert "Connection refused (127.0.0.1:1)" in problem.message
    assert time.monotonic() - began < 60  # retries without a limit would take 10 seconds for each of 8 requests


@in_loop
async def test_unknown_host_is_unavailable(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment("http://nowhere.invalid", "admin-key", "admin-secret"))

    with pytest.raises(Unavailable, match=r"\(nowhere\.invalid\)") as caught:
        await open_bucket(bucket.url).get("a")
    assert_harmless(caught.value)


@in_loop
async def test_silent_server_times_out(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", {"max_retries": 0})
    monkeypatch.setattr(object_store, "_FOR_RECORDS", {"timeout": timedelta(milliseconds=200)})

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        use(monkeypatch, environment(f"http://127.0.0.1:{port}", "admin-key", "admin-secret"))
        silent = open_bucket(bucket.url)
        verbs: list[Callable[[], Awaitable[object]]] = [lambda: silent.get("a"), lambda: silent.create("a", b"1")]
        for verb in verbs:
            with pytest.raises(Unavailable, match=rf"timed out \(127\.0\.0\.1:{port}\)"):
                await verb()


@in_loop
async def test_writing_a_record_can_be_cancelled_while_the_server_is_silent(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that is stopped must not wait for a store that hangs."""
    monkeypatch.setattr(object_store, "_FOR_RECORDS", {"timeout": timedelta(minutes=2)})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        use(monkeypatch, environment(f"http://127.0.0.1:{port}", "admin-key", "admin-secret"))
        hanging = open_bucket(bucket.url)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await hanging.put("replicas/gpu-0.json", b"{}")
        assert time.monotonic() - began < 50


@in_loop
async def test_close_waits_until_cancelled_requests_have_ended(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one of obstore's threads may need the interpreter when that exits, which crashes the process."""
    monkeypatch.setattr(object_store, "_FOR_RECORDS", {"timeout": timedelta(minutes=2)})
    monkeypatch.setattr(object_store, "_LAST_REQUESTS", 300.0)  # it takes milliseconds, but this machine may be busy
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        use(monkeypatch, environment(f"http://127.0.0.1:{port}", "admin-key", "admin-secret"))
        hanging = open_bucket(bucket.url)
        assert isinstance(hanging, object_store.ObjectStoreBucket)
        tasks = [asyncio.create_task(hanging.get("a")) for _ in range(64)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await hanging.close()
        assert not hanging._requests


@pytest.fixture
def lossy(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Lossy:
    # By default nothing is retried after 10 seconds, which a busy machine may take for one request.
    monkeypatch.setattr(object_store, "_RETRIES", object_store._RETRIES | {"retry_timeout": timedelta(minutes=2)})
    return Lossy(seaweedfs.endpoint)


@in_loop
async def test_create_reports_a_conflict_after_a_lost_reply(
    lossy: Lossy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lossy:
        use(monkeypatch, environment(lossy.endpoint, "admin-key", "admin-secret"))
        far = open_bucket(bucket.url)
        lossy.drop = 1
        with pytest.raises(AlreadyExists, match="after a lost reply it may be your own"):
            await far.create("a", b"mine")
    assert await bucket.get("a") == b"mine"


@in_loop
async def test_requests_are_retried_after_lost_replies(
    lossy: Lossy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(20_000_000)
    with lossy:
        use(monkeypatch, environment(lossy.endpoint, "admin-key", "admin-secret"))
        far = open_bucket(bucket.url)
        for loss in (1, 2):
            lossy.drop = loss
            await far.put("a", data)
            lossy.drop = loss
            assert await far.get("a") == data
            lossy.drop = loss
            assert len(await far.list("")) == 1


@in_loop
async def test_interrupted_download_resumes_or_fails(
    lossy: Lossy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, memory = os.urandom(20_000_000), bytearray(20_000_000)
    await bucket.put("a", data)
    with lossy:
        use(monkeypatch, environment(lossy.endpoint, "admin-key", "admin-secret"))
        far = open_bucket(bucket.url)
        lossy.cut = 2
        await far.read_into("a", memoryview(memory))
        assert memory == data

        lossy.cut, lossy.after = 1000, 1000
        with pytest.raises(Unavailable) as caught:
            await far.read_into("a", memoryview(memory))
        assert_harmless(caught.value)


@pytest.mark.slow
@in_loop
async def test_client_works_again_after_a_server_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SeaweedFS(tmp_path)
    use(monkeypatch, server.env)
    with running(server):
        bucket = open_bucket(server.url("run"))
        await bucket.create("a", b"1")
        server.kill()
        with pytest.raises(Unavailable):
            await bucket.get("a")
        with pytest.raises(Unavailable):
            await bucket.create("b", b"2")

        server.start()
        assert await bucket.get("a") == b"1"
        await bucket.create("b", b"2")
        with pytest.raises(AlreadyExists):
            await bucket.create("a", b"2")


# Parts


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([1], [1]),
        ([10], [10]),
        ([11], [10, 1]),
        ([3, 3, 3, 3, 3], [10, 5]),
        ([25, 5], [10, 10, 10]),
        ([5, 40], [10, 10, 10, 10, 5]),
    ],
)
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_parts_have_equal_size(sizes: list[int], parts: list[int], kind: Callable[[bytes], bytes]) -> None:
    data = os.urandom(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    views = [memoryview(kind(data[end - size : end])) for size, end in zip(sizes, ends, strict=True)]

    found = list(object_store._parts(views, 10))

    assert [len(part) for part in found] == parts
    assert b"".join(found) == data


def test_parts_of_immutable_data_are_not_copied() -> None:
    data = bytes(100)

    assert all(
        isinstance(part, memoryview) and part.obj is data for part in object_store._parts([memoryview(data)], 10)
    )


def test_huge_object_stays_below_the_part_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(object_store.ObjectStoreBucket, "_upload", lambda self, key, parts, size: sizes.append(size))

    for size in (100, 10 << 30, 500 << 30, 5 << 40, None):
        asyncio.run(open_bucket("memory://huge").put("a", [], size))

    assert sizes[0] == sizes[1] == 8 << 20
    assert all(-(-size // part) < 10_000 for size, part in zip((500 << 30, 5 << 40), sizes[2:], strict=False))
    assert sizes[4] < 32 << 20


@in_loop
async def test_a_store_that_lies_about_the_size_is_not_read_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    class Endless:
        meta: ClassVar[dict[str, int]] = {"size": 5}

        async def stream(self, min_chunk_size: int) -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 1
                yield bytes(1000)

    async def get(*_: object) -> Endless:
        return Endless()

    monkeypatch.setattr(obstore, "get_async", get)
    with pytest.raises(TooLarge, match=r"run\.json: has more than 9,000 bytes"):
        await open_bucket("memory://lies/run").get("run.json", 9000)
    assert sent == 10
