"""Buckets of the Hub: the real client against a fake hub."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import pytest

from support.fake_hub import FakeHub
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.probe import probe_bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import AlreadyExists, BucketError, NotFound, PermissionDenied, Unavailable
from weightwire.testing import ODD_NAMES, BucketContract, Opener, in_loop

fresh = itertools.count()


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with pytest.MonkeyPatch.context() as patch, FakeHub(tmp_path_factory.mktemp("xet")).running() as hub:
        # hf_xet writes its logs there.
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        yield hub


@pytest.fixture
def hub(shared_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("HF_ENDPOINT", shared_hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", shared_hub.token)
    monkeypatch.setattr(shared_hub, "status", 0)
    monkeypatch.setattr(shared_hub, "after_batch", lambda: None)
    shared_hub.requests.clear()
    return shared_hub


class TestHub(BucketContract):
    # Each name takes six requests.
    odd_names = ODD_NAMES[::4]

    @pytest.fixture
    def opener(self, hub: FakeHub) -> Opener:
        url = f"hf://buckets/someone/contract-{next(fresh)}/some/run"
        return lambda: open_bucket(url)


@pytest.fixture
def name(hub: FakeHub) -> str:
    return f"someone/bucket-{next(fresh)}"


@pytest.fixture
def bucket(name: str) -> Bucket:
    return open_bucket(f"hf://buckets/{name}/run")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the client retries for up to 23 seconds and logs every retry."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.logger.warning", lambda *args: None)


async def all_fail(bucket: Bucket, error: type[BucketError], what: str, *, but: str = "") -> None:
    verbs: dict[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: bucket.get("a"),
        "read_into": lambda: bucket.read_into("a", memoryview(bytearray(1))),
        "find": lambda: bucket.find("a"),
        "list": lambda: bucket.list(""),
        "create": lambda: bucket.create("a", b"1"),
        "put": lambda: bucket.put("a", b"1"),
        "delete": lambda: bucket.delete("a"),
    }
    for name, verb in verbs.items():
        if name in but:
            continue
        with pytest.raises(error, match=what) as caught:
            await verb()
        assert type(caught.value) is error, name
        assert caught.value.message.startswith(f"{bucket.url}/")
        assert caught.value.hint
        assert len(str(caught.value).splitlines()) == 2
        assert FakeHub.token not in str(caught.value)


# The bucket itself


@in_loop
async def test_first_write_creates_a_private_bucket(hub: FakeHub, name: str, bucket: Bucket) -> None:
    await bucket.create("a", b"1")
    await bucket.put("b", b"2")

    assert hub.private[name]
    assert set(hub.buckets[name]) == {"run/a", "run/b"}
    assert hub.requests.count(f"POST /api/buckets/{name}") == 1


@in_loop
async def test_reading_creates_no_bucket(hub: FakeHub, name: str, bucket: Bucket) -> None:
    assert await bucket.list("") == []
    assert await bucket.find("a") is None
    await bucket.delete("a")
    await all_fail(bucket, NotFound, "HF_TOKEN", but="find list create put delete")

    assert name not in hub.buckets


@in_loop
async def test_bucket_is_not_strict_and_is_not_probed(hub: FakeHub, bucket: Bucket) -> None:
    assert not bucket.strict
    await probe_bucket(bucket, "token")
    assert not [request for request in hub.requests if "/buckets/" in request]


# Concurrent writers


@in_loop
async def test_concurrent_writer_is_detected(hub: FakeHub, name: str, bucket: Bucket) -> None:
    await bucket.put("other", b"theirs")

    def overwrite() -> None:
        files = hub.buckets[name]
        files["run/a"] = {**files["run/other"], "path": "run/a"}

    hub.after_batch = overwrite
    # By the size, and by the bytes if the size is the same.
    with pytest.raises(Unavailable, match="4 bytes were sent, 6 were stored"):
        await bucket.create("a", b"mine")
    hub.buckets[name].pop("run/a")
    with pytest.raises(AlreadyExists, match="run only one publisher on an hf:// bucket"):
        await bucket.create("a", b"mine!!")


@in_loop
async def test_lost_write_is_detected(hub: FakeHub, name: str, bucket: Bucket) -> None:
    hub.after_batch = lambda: hub.buckets[name].clear()

    with pytest.raises(Unavailable, match="not found after the upload"):
        await bucket.put("a", b"1")
    with pytest.raises(Unavailable, match="not found after the upload"):
        await bucket.create("a", b"1")


@in_loop
async def test_delete_succeeds_if_another_process_deleted_first(hub: FakeHub, name: str, bucket: Bucket) -> None:
    await bucket.put("a", b"1")
    look = bucket._look  # type: ignore[attr-defined]

    def look_and_lose(key: str) -> object:
        found: object = look(key)
        hub.buckets[name].pop(key, None)
        return found

    bucket._look = look_and_lose  # type: ignore[attr-defined]
    await bucket.delete("a")
    assert not hub.buckets[name]


# Reading in parts


@in_loop
async def test_reading_parts_downloads_the_file_once(hub: FakeHub, bucket: Bucket) -> None:
    data = bytes(range(256)) * 1000
    await bucket.put("a", data)
    hub.requests.clear()
    memory = bytearray(100)

    async def read(start: int) -> bytes:
        own = bytearray(100)
        await bucket.read_into("a", memoryview(own), start)
        return bytes(own)

    assert await asyncio.gather(*map(read, range(0, 1000, 100))) == [data[at : at + 100] for at in range(0, 1000, 100)]
    assert len([request for request in hub.requests if request.startswith("HEAD")]) == 1

    await bucket.put("a", bytes(1000))
    await bucket.read_into("a", memoryview(memory), 50)
    assert memory == bytes(100)
    await bucket.close()
    await bucket.close()


# Errors of the Hub


@in_loop
async def test_wrong_token_is_permission_denied(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")

    await all_fail(bucket, PermissionDenied, "the Hub answered 401\nhint: set HF_TOKEN")


@in_loop
async def test_token_without_rights_is_permission_denied(hub: FakeHub, bucket: Bucket) -> None:
    hub.status = 403

    await all_fail(bucket, PermissionDenied, "the Hub answered 403\nhint: set HF_TOKEN")


@pytest.mark.usefixtures("_impatient")
@in_loop
async def test_server_error_is_unavailable(hub: FakeHub, bucket: Bucket) -> None:
    await bucket.put("a", b"1")
    hub.status = 503

    # A put would retry for minutes inside hf_xet.
    await all_fail(bucket, Unavailable, "the Hub answered 503", but="put")


@pytest.mark.usefixtures("_impatient")
@in_loop
async def test_rate_limit_is_unavailable(hub: FakeHub, bucket: Bucket) -> None:
    await bucket.put("a", b"1")
    hub.status = 429

    await all_fail(bucket, Unavailable, "poll less often", but="put")


@pytest.mark.usefixtures("_impatient")
@in_loop
async def test_unreachable_hub_is_unavailable(hub: FakeHub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")

    await all_fail(open_bucket(f"hf://buckets/{name}"), Unavailable, "Connection refused")


@in_loop
async def test_invalid_name_is_an_error(hub: FakeHub) -> None:
    with pytest.raises(BucketError) as caught:
        await open_bucket("hf://buckets/a b/c--d/run").create("a", b"")
    assert caught.value.hint
