"""Threads and parallel transfers: cancellation, errors and limits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from weightwire.bucket.concurrency import each, in_thread, pieces
from weightwire.errors import BucketError
from weightwire.testing import in_loop


@in_loop
async def test_work_in_a_thread_returns_its_result_or_raises_its_error() -> None:
    assert await in_thread(lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@in_loop
async def test_cancelling_waits_for_the_thread() -> None:
    stop, ended = threading.Event(), threading.Event()

    def work() -> None:
        stop.wait(60)
        time.sleep(0.05)
        ended.set()
        raise ZeroDivisionError

    task = asyncio.ensure_future(in_thread(work, stop))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    # Cancel again while it waits.
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@in_loop
async def test_transfers_are_limited_in_concurrency() -> None:
    done: list[int] = []
    running = most = 0

    async def transfer(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        done.append(item)

    await each(range(20), 3, transfer)

    assert sorted(done) == list(range(20))
    assert most == 3


@in_loop
async def test_first_error_cancels_the_others() -> None:
    started, ended = 0, 0

    async def transfer(item: int) -> None:
        nonlocal started, ended
        started += 1
        try:
            await asyncio.sleep(0.01 if item == 2 else 60)
            raise ZeroDivisionError
        finally:
            ended += 1

    with pytest.raises(ZeroDivisionError):
        await each(range(100), 4, transfer)
    assert started == ended == 4


@in_loop
async def test_several_errors_raise_one() -> None:
    async def transfer(item: int) -> None:
        raise ZeroDivisionError(item)

    with pytest.raises(ZeroDivisionError):
        await each(range(10), 4, transfer)


@in_loop
async def test_cancelling_waits_for_all_transfers() -> None:
    ended = 0

    async def transfer(item: int) -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01 * item)
            ended += 1

    task = asyncio.ensure_future(each(range(10), 4, transfer))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == 4


def test_pieces_are_flat_and_bounded() -> None:
    data = bytes(40 << 20)

    views = list(pieces(data, "a", len(data), threading.Event()))

    assert [len(view) for view in views] == [16 << 20, 16 << 20, 8 << 20]
    assert all(view.format == "B" and view.obj is data for view in views)


def test_pieces_raise_after_stop() -> None:
    stop = threading.Event()
    views = pieces([b"1", b"2"], "a", None, stop)
    next(views)
    stop.set()

    with pytest.raises(BucketError, match="cancelled"):
        next(views)
