"""Told apart by run.json: an object that is missing, and a key that has no rights."""

from __future__ import annotations

import asyncio

import pytest

from support.failing_bucket import Troubled, denied, in_memory
from weightwire.chain.absence import denied_means_missing
from weightwire.chain.records import RUN
from weightwire.errors import NotFound, PermissionDenied, Unavailable


async def ask(bucket: Troubled) -> bytes:
    async with denied_means_missing(bucket, "deltas/2/x"):
        return await bucket.get("deltas/2/x")


def a_bucket() -> Troubled:
    bucket = in_memory()
    asyncio.run(bucket.inner.put(RUN, b"{}"))
    return bucket


def test_a_denied_object_is_missing_where_run_json_can_be_read() -> None:
    bucket = a_bucket()
    bucket.trouble("get", "deltas/", denied)
    with pytest.raises(NotFound, match=r"memory://.*/deltas/2/x: is not there") as caught:
        asyncio.run(ask(bucket))
    assert caught.value.hint


def test_a_key_that_cannot_read_run_json_has_no_rights() -> None:
    bucket = a_bucket()
    bucket.trouble("get", "", denied, times=2)
    with pytest.raises(PermissionDenied):
        asyncio.run(ask(bucket))


def test_every_other_answer_passes_as_it_is() -> None:
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
