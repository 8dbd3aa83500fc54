"""The ranks of a torch job: a separate gloo process group for the publisher.

It exchanges bytes on the CPU and never interferes with the trainer's own collectives.
"""

from __future__ import annotations

import asyncio
import queue
import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightwire.errors import RankFailed

__all__ = ["Ranks"]

_SMALL = 4096  # bytes that are always sent; longer messages take a second round
_COUNT = 8  # bytes of the length prefix
_PAUSE, _LONG_PAUSE = 0.0005, 0.02  # seconds between two polls
_LEAVING = 1.0  # seconds to wait for the group to close
_LOST = "one of the processes has ended or hangs: check its log, then restart all of them"

_Exchange = tuple[bytes, asyncio.AbstractEventLoop, "asyncio.Future[list[bytes]]"]


class Ranks:
    """All processes of a `group`, or of the job. Pass `Publisher(url, ranks=Ranks())` in each of them.

    All processes must create it at the same point, like any process group. The publisher closes it. A rank that does
    not answer for `timeout` seconds counts as lost.
    """

    rank: int
    size: int

    def __init__(self, group: Any = None, *, timeout: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RankFailed(
                "torch.distributed is not initialized in this process",
                hint="call torch.distributed.init_process_group() first, or leave out ranks= for a single process",
            )
        ours = _new_group(group, timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(ours), dist.get_world_size(ours)
        self._jobs: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        # Only this thread holds the group, so that the group ends with it. It may wait very long and must not keep the
        # process alive: a daemon thread, not one of a pool.
        arguments = (ours, self.rank, self.size, self._jobs)
        self._thread = threading.Thread(target=_serve, args=arguments, name="weightwire-ranks", daemon=True)
        self._thread.start()

    async def gather(self, data: bytes) -> list[bytes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[bytes]] = loop.create_future()
        if not self._thread.is_alive():
            raise RankFailed(f"rank {self.rank} has left its group", hint=_LOST)
        self._jobs.put((data, loop, future))
        return await future

    def close(self) -> None:
        self._jobs.put(None)
        # The trainer may destroy the default group next, which this group depends on.
        self._thread.join(_LEAVING)


def _new_group(group: Any, timeout: timedelta) -> Any:
    if group is None:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc="weightwire")
    members = dist.get_process_group_ranks(group)
    # Processes outside of the group do not call this.
    return dist.new_group(
        members, backend="gloo", timeout=timeout, group_desc="weightwire", use_local_synchronization=True
    )


def _serve(group: Any, rank: int, size: int, jobs: queue.SimpleQueue[_Exchange | None]) -> None:
    """Serves exchanges in order until it is closed or a rank is lost. Ending makes the other ranks fail."""
    while (job := jobs.get()) is not None:
        data, loop, future = job
        try:
            everyone = _gather(data, size, group)
        except Exception as problem:
            message = f"rank {rank} of {size} lost its connection to the others ({_reason(problem)})"
            _answer(loop, future, RankFailed(message, hint=_LOST))
            break
        _answer(loop, future, everyone)
    with suppress(Exception):  # closed with the default group
        dist.destroy_process_group(group)


def _reason(problem: Exception) -> str:
    """The first sentence of gloo's message, without its source location."""
    text = str(problem) or type(problem).__name__
    return re.sub(r"^\[[^]]*\] *", "", text.splitlines()[0]).split(". ")[0]


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[list[bytes]], answer: list[bytes] | RankFailed
) -> None:
    def finish() -> None:
        if future.done():  # cancelled
            return
        if isinstance(answer, RankFailed):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(finish)


def _gather(data: bytes, size: int, group: Any) -> list[bytes]:
    framed = len(data).to_bytes(_COUNT, "little") + data
    heads = _all(framed[:_SMALL], _SMALL, size, group)
    counts = [_COUNT + int.from_bytes(head[:_COUNT], "little") for head in heads]
    rest = max(counts) - _SMALL
    tails = _all(framed[_SMALL:], rest, size, group) if rest > 0 else [b""] * size
    return [(head + tail)[_COUNT:count] for head, tail, count in zip(heads, tails, counts, strict=True)]


def _all(data: bytes, length: int, size: int, group: Any) -> list[bytes]:
    """Gathers `length` bytes of every rank."""
    mine = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty(length, dtype=torch.uint8, device="cpu") for _ in range(size)]
    work = dist.all_gather(everyone, mine, group=group, async_op=True)
    # Poll instead of work.wait(): a thread inside torch at exit crashes the process.
    pause = _PAUSE
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _LONG_PAUSE)
    work.wait()  # raises what went wrong
    return [one.numpy().tobytes() for one in everyone]
