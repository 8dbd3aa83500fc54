"""How backends wait, for a thread or for several transfers at a time, and feed them. Nothing is left running.

Knows nothing of stores.
"""

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
    """Runs what blocks. A thread cannot be stopped, only asked to: whoever cancels this waits for it, so that nothing
    is written, to a buffer or to a bucket, behind the back of someone who has moved on."""
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        await _await_end(future)
        raise


async def each(items: Iterable[Item], at_once: int, transfer: Callable[[Item], Awaitable[None]]) -> None:
    """Runs `transfer` for all items, so many at once. The first error ends the others before it is raised."""
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await transfer(item)

    tasks = [asyncio.create_task(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            # Not twice: it may be cleaning up already.
            if not task.cancelling():
                task.cancel()
        for task in tasks:
            await _await_end(task)


async def _await_end(future: asyncio.Future[Result]) -> None:
    """Waits until it is over, even if cancelled again, and looks at how it ended, or asyncio would complain."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()


def flat(view: memoryview) -> memoryview:
    """The same memory as bytes; Python does not cast what is empty in more than one dimension."""
    return view.cast("B") if view.nbytes else memoryview(b"")


def pieces(
    data: Iterable[bytes | memoryview] | bytes, path: str, size: int | None, stop: threading.Event
) -> Iterator[memoryview]:
    """What is to be written, in flat pieces of bounded size, until someone says stop. Ends in an error if it was not as
    much as was said."""
    total = 0
    for buffer in [data] if isinstance(data, bytes) else data:
        view = flat(memoryview(buffer))
        for start in range(0, len(view), _PIECE):
            if stop.is_set():
                raise BucketError(f"{path}: stopped")
            yield view[start : start + _PIECE]
        total += len(view)
    if size is not None and total != size:
        raise BucketError(f"{path}: was to have {size:,} bytes, but {total:,} were given", hint="nothing was written")
