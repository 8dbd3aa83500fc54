"""run.json tells a missing object from a key without permission."""

from __future__ import annotations

import asyncio

import pytest

from support.failing_bucket import Troubled, denied, in_memory
from weightwire.chain.absence import denied_means_missing, find_or_list, is_run_missing
from weightwire.chain.reader import read_run
from weightwire.chain.record_paths import RUN
from weightwire.errors import NoRun, NotFound, PermissionDenied, Unavailable


async def ask(bucket: Troubled) -> bytes:
    async with denied_means_missing(bucket, "deltas/2/x"):
        return await bucket.get("deltas/2/x")


def a_bucket() -> Troubled:
    bucket = in_memory()
    asyncio.run(bucket.inner.put(RUN, b"{}"))
    return bucket


def test_a_denied_object_is_missing_if_run_json_can_be_read() -> None:
    bucket = a_bucket()
    bucket.trouble("get", "deltas/", denied)
    with pytest.raises(NotFound, match=r"memory://.*/deltas/2/x: not found") as caught:
        asyncio.run(ask(bucket))
    assert caught.value.hint


def test_a_key_that_cannot_read_run_json_is_denied() -> None:
    bucket = a_bucket()
    bucket.trouble("get", "", denied, times=2)
    with pytest.raises(PermissionDenied):
        asyncio.run(ask(bucket))


def test_other_errors_are_unchanged() -> None:
    bucket = a_bucket()
    with pytest.raises(NotFound):
        asyncio.run(ask(bucket))
    asyncio.run(bucket.inner.put("deltas/2/x", b"here"))
    assert asyncio.run(ask(bucket)) == b"here"
    assert not bucket.count("get", RUN)

    async def failed(act: object) -> None:
        raise Unavailable("later")

    bucket.trouble("get", "", failed)
    with pytest.raises(Unavailable):
        asyncio.run(ask(bucket))


def test_denied_object_is_missing_if_its_folder_does_not_list_it() -> None:
    bucket = a_bucket()
    bucket.trouble("find", "deltas/", denied, times=3)
    assert asyncio.run(find_or_list(bucket, "deltas/2/x")) is None

    asyncio.run(bucket.inner.put("deltas/2/x", b"here"))
    with pytest.raises(PermissionDenied):
        asyncio.run(find_or_list(bucket, "deltas/2/x"))

    bucket.trouble("list", "deltas/", denied)
    with pytest.raises(PermissionDenied):
        asyncio.run(find_or_list(bucket, "deltas/2/x"))


def test_denied_run_does_not_exist_if_it_has_no_epochs() -> None:
    bucket = in_memory()
    bucket.trouble("get", RUN, denied, times=2)
    with pytest.raises(NoRun, match="nothing has been published"):
        asyncio.run(read_run(bucket))

    asyncio.run(bucket.inner.put("epochs/00000001.json", b"{}"))
    with pytest.raises(PermissionDenied):
        asyncio.run(read_run(bucket))


def test_key_without_list_permission_cannot_tell_whether_a_run_exists() -> None:
    bucket = in_memory()
    bucket.trouble("list", "epochs/", denied)
    assert not asyncio.run(is_run_missing(bucket))
