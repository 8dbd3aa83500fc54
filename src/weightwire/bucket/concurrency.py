"""Threads and parallel transfers for the backends. Nothing keeps running after a call returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from weightwire.errors import BucketError

__all__ = ["each", "flat", "in_thread", "pieces"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_PIECE = 16 << 20


async def in_thread(function: Callable[[], Result], stop: threading.Event | None = None) -> Result:
    """Runs a blocking function in a thread.

    A thread cannot be stopped from outside. Cancelling this sets `stop` and waits for the thread to end, so nothing is
    written to a buffer or a bucket after the caller has moved on.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        await _await_end(future)
        raise


async def each(items: Iterable[Item], at_once: int, transfer: Callable[[Item], Awaitable[None]]) -> None:
    """Runs `transfer` for all items, `at_once` at a time. The first error cancels the others and is then raised."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await transfer(item)

    tasks = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            # A second cancel would interrupt its cleanup.
            if not task.cancelling():
                task.cancel()
        for task in tasks:
            await _await_end(task)


async def _await_end(future: asyncio.Future[Result]) -> None:
    """Waits for the end, even if cancelled again. Retrieves the exception, or asyncio would log it."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()


def flat(view: memoryview) -> memoryview:
    """The same memory as bytes. Python cannot cast an empty view with several dimensions."""
    return view.cast("B") if view.nbytes else memoryview(b"")


def pieces(
    data: Iterable[bytes | memoryview] | bytes, path: str, size: int | None, stop: threading.Event
) -> Iterator[memoryview]:
    """The data to write, in flat pieces of bounded size. Raises if `stop` is set, or if the total is not `size`."""
    total = 0
    for buffer in [data] if isinstance(data, bytes) else data:
        view = flat(memoryview(buffer))
        for start in range(0, len(view), _PIECE):
            if stop.is_set():
                raise BucketError(f"{path}: the write was cancelled", hint="nothing was written")
            yield view[start : start + _PIECE]
        total += len(view)
    if size is not None and total != size:
        raise BucketError(f"{path}: expected {size:,} bytes to write, got {total:,}", hint="nothing was written")
