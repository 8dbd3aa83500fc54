"""Object stores: the contract, in memory and on SeaweedFS; and what is said when something is wrong."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from support.stores import NOWHERE, Lossy, SeaweedFS, environment, running, use
from weightwire.bucket import object_store
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, BucketError, NoBucket, NotFound, PermissionDenied, Unavailable
from weightwire.testing import BucketContract, Opener, in_loop

fresh = itertools.count()


class TestMemory(BucketContract):
    @pytest.fixture
    def opener(self) -> Opener:
        url = f"memory://contract-{next(fresh)}/some/prefix"
        return lambda: open_bucket(url)


class TestSeaweedFS(BucketContract):
    # Losers wait for a second or more there.
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
    """Every verb raises this error, which names the object and gives nothing away. Returns the last one."""
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
    """One line and a hint, and no secret: not even in a traceback."""
    assert len(str(problem).splitlines()) == 2
    assert len(str(problem)) < 600
    text = "".join(traceback.format_exception(problem))
    assert "-secret" not in text
    assert "Signature=" not in text
    assert "Debug source" not in text


# Credentials


@in_loop
async def test_a_wrong_secret(seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment(seaweedfs.endpoint, "admin-key", "wrong-secret"))

    problem = await all_fail(open_bucket(bucket.url), PermissionDenied)

    assert problem.hint
    assert "AWS_SECRET_ACCESS_KEY" in problem.hint
    with pytest.raises(PermissionDenied, match="SignatureDoesNotMatch, The request signature"):
        await open_bucket(bucket.url).get("a")


@in_loop
async def test_an_unknown_key(seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment(seaweedfs.endpoint, "nobody-key", "nobody-secret"))

    await all_fail(open_bucket(bucket.url), PermissionDenied)


@in_loop
async def test_a_key_that_may_only_read(seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    await bucket.put("a", bytes(20_000_000))
    use(monkeypatch, seaweedfs.env_of("reader"))
    reader = open_bucket(bucket.url)

    assert await reader.get("a") == bytes(20_000_000)
    assert len(await reader.list("")) == 1
    with pytest.raises(NotFound):
        await reader.get("b")
    await all_fail(reader, PermissionDenied, but="get read_into find list")


@in_loop
async def test_a_key_that_may_not_list(seaweedfs: SeaweedFS, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    await bucket.put("a", b"1")
    use(monkeypatch, seaweedfs.env_of("blind"))
    blind = open_bucket(bucket.url)

    assert await blind.get("a") == b"1"
    with pytest.raises(PermissionDenied, match="s3:ListBucket"):
        await blind.list("")


@in_loop
async def test_no_credentials_at_all(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Where a machine in the cloud would ask: nobody is there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254:1")
    monkeypatch.setattr(object_store, "_RETRIES", {"max_retries": 0})
    monkeypatch.setattr(object_store, "_FOR_RECORDS", {"connect_timeout": timedelta(milliseconds=200)})

    with pytest.raises(PermissionDenied, match="there are no credentials") as caught:
        await open_bucket(bucket.url).get("a")
    assert caught.value.hint
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    assert "boto3" in caught.value.hint


# Buckets


@in_loop
async def test_a_bucket_that_is_not_there(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, seaweedfs.env)
    missing = open_bucket("s3://no-such-bucket/run")

    # Whether an object or its bucket is missing, the answer to a question without a body does not say.
    assert await missing.find("a") is None
    await missing.delete("a")
    problem = await all_fail(missing, NoBucket, but="find delete")
    assert problem.hint
    assert "create the bucket first" in problem.hint
    assert "NoSuchBucket" in problem.message


@in_loop
async def test_prefixes_do_not_see_each_other(seaweedfs: SeaweedFS, bucket: Bucket) -> None:
    inner, beside = open_bucket(f"{bucket.url}/a"), open_bucket(f"{bucket.url}-2")
    await inner.put("b", b"1")
    await beside.put("c", b"2")

    assert [entry.path for entry in await bucket.list("")] == ["a/b"]
    assert [entry.path for entry in await inner.list("")] == ["b"]
    assert await bucket.get("a/b") == b"1"
    whole = [entry.path for entry in await open_bucket(f"s3://{seaweedfs.bucket}").list("")]
    assert f"{bucket.url.rpartition('/')[2]}/a/b" in whole


@in_loop
async def test_memory_is_shared_by_name() -> None:
    await open_bucket("memory://shared/a").put("b", b"1")

    assert await open_bucket("memory://shared").get("a/b") == b"1"
    assert await open_bucket("memory://other").find("a/b") is None


@in_loop
async def test_long_listings_come_in_pages(bucket: Bucket) -> None:
    names = [f"commits/{number:020}.json" for number in range(1001)]
    await asyncio.gather(*(bucket.put(name, b"") for name in names))

    assert [entry.path for entry in await bucket.list("commits/")] == names


# Roads


@in_loop
async def test_an_endpoint_where_nobody_is(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment(NOWHERE, "admin-key", "admin-secret"))
    start = time.monotonic()

    problem = await all_fail(open_bucket(bucket.url), Unavailable)

    assert "Connection refused (127.0.0.1:1)" in problem.message
    assert time.monotonic() - start < 15


@in_loop
async def test_a_name_that_nobody_knows(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment("http://nowhere.invalid", "admin-key", "admin-secret"))

    with pytest.raises(Unavailable, match=r"\(nowhere\.invalid\)") as caught:
        await open_bucket(bucket.url).get("a")
    assert_harmless(caught.value)


@in_loop
async def test_a_server_that_is_silent(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def lossy(seaweedfs: SeaweedFS) -> Lossy:
    return Lossy(seaweedfs.endpoint)


@in_loop
async def test_a_lost_reply_is_a_conflict_with_oneself(
    lossy: Lossy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lossy:
        use(monkeypatch, environment(lossy.endpoint, "admin-key", "admin-secret"))
        far = open_bucket(bucket.url)
        lossy.drop = 1
        with pytest.raises(AlreadyExists, match="it may be one's own"):
            await far.create("a", b"mine")
    assert await bucket.get("a") == b"mine"


@in_loop
async def test_lost_replies_are_asked_for_again(lossy: Lossy, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_a_download_that_is_cut_goes_on_or_fails(
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
async def test_a_server_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_parts_are_of_equal_size(sizes: list[int], parts: list[int], kind: Callable[[bytes], bytes]) -> None:
    data = os.urandom(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    views = [memoryview(kind(data[end - size : end])) for size, end in zip(sizes, ends, strict=True)]

    found = list(object_store._parts(views, 10))

    assert [len(part) for part in found] == parts
    assert b"".join(found) == data


def test_parts_of_what_cannot_change_are_not_copied() -> None:
    data = bytes(100)

    assert all(
        isinstance(part, memoryview) and part.obj is data for part in object_store._parts([memoryview(data)], 10)
    )


def test_parts_of_a_huge_object_are_few_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(object_store.ObjectStoreBucket, "_upload", lambda self, key, parts, size: sizes.append(size))

    for size in (100, 10 << 30, 500 << 30, 5 << 40, None):
        asyncio.run(open_bucket("memory://huge").put("a", [], size))

    assert sizes[0] == sizes[1] == 8 << 20
    assert all(-(-size // part) < 10_000 for size, part in zip((500 << 30, 5 << 40), sizes[2:], strict=False))
    assert sizes[4] < 32 << 20
