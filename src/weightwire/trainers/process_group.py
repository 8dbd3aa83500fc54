"""The ranks of a torch job, as a publisher needs them: a gloo group of our own, beside whatever trains.

Knows torch.distributed and bytes; nothing of weights. What is said here never gets into the way of the trainer's own
collectives, and does not need the accelerators.
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

from weightwire.errors import RankFailed, WeightwireError

__all__ = ["Ranks"]

_SMALL = 4096  # bytes that are always sent; more only where someone has more to say
_COUNT = 8  # bytes that say how many follow
_PAUSE, _LONG_PAUSE = 0.0005, 0.02  # seconds between two looks at what others say
_LEAVING = 1.0  # seconds in which a group that nobody uses any more is closed
_LOST = "one of the processes has ended, or hangs: see its log, and restart all of them"

_Exchange = tuple[bytes, asyncio.AbstractEventLoop, "asyncio.Future[list[bytes]]"]


class Ranks:
    """All processes of a `group`, or of the job: `Publisher(url, ranks=Ranks())`, in each of them.

    Made by all of them at the same point, as any process group is; it belongs to the publisher, which closes it. Who
    says nothing for `timeout` seconds counts as gone.
    """

    rank: int
    size: int

    def __init__(self, group: Any = None, *, timeout: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise WeightwireError(
                "this process is not one of several ranks",
                hint="call torch.distributed.init_process_group() first; a single process needs no ranks",
            )
        ours = _new_group(group, timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(ours), dist.get_world_size(ours)
        self._jobs: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        # Only the thread holds the group, which ends when nobody does. It may wait for very long, and must not keep
        # the process from ending: so it is none of a pool.
        arguments = (ours, self.rank, self.size, self._jobs)
        self._thread = threading.Thread(target=_serve, args=arguments, name="weightwire-ranks", daemon=True)
        self._thread.start()

    async def gather(self, data: bytes) -> list[bytes]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[bytes]] = loop.create_future()
        if not self._thread.is_alive():
            raise RankFailed(f"rank {self.rank} has left the others", hint=_LOST)
        self._jobs.put((data, loop, future))
        return await future

    def close(self) -> None:
        self._jobs.put(None)
        # Whoever trains may close its own group next, which this one is part of.
        self._thread.join(_LEAVING)


def _new_group(group: Any, timeout: timedelta) -> Any:
    if group is None:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc="weightwire")
    members = dist.get_process_group_ranks(group)
    # Processes outside of the group know nothing of this.
    return dist.new_group(
        members, backend="gloo", timeout=timeout, group_desc="weightwire", use_local_synchronization=True
    )


def _serve(group: Any, rank: int, size: int, jobs: queue.SimpleQueue[_Exchange | None]) -> None:
    """One after the other, until it is closed or a rank is lost: then the others are to lose this one, too."""
    while (job := jobs.get()) is not None:
        data, loop, future = job
        try:
            everyone = _gather(data, size, group)
        except Exception as problem:
            what = f"rank {rank} of {size} has lost the others ({_reason(problem)})"
            _answer(loop, future, RankFailed(what, hint=_LOST))
            break
        _answer(loop, future, everyone)
    with suppress(Exception):  # if the whole job has been closed, this is too
        dist.destroy_process_group(group)


def _reason(problem: Exception) -> str:
    """What happened, without where in gloo's sources, and what one might do about it."""
    text = str(problem) or type(problem).__name__
    return re.sub(r"^\[[^]]*\] *", "", text.splitlines()[0]).split(". ")[0]


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[list[bytes]], answer: list[bytes] | RankFailed
) -> None:
    def tell() -> None:
        if future.done():  # nobody waits for it any more
            return
        if isinstance(answer, RankFailed):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(tell)


def _gather(data: bytes, size: int, group: Any) -> list[bytes]:
    framed = len(data).to_bytes(_COUNT, "little") + data
    heads = _all(framed[:_SMALL], _SMALL, size, group)
    counts = [_COUNT + int.from_bytes(head[:_COUNT], "little") for head in heads]
    rest = max(counts) - _SMALL
    tails = _all(framed[_SMALL:], rest, size, group) if rest > 0 else [b""] * size
    return [(head + tail)[_COUNT:count] for head, tail, count in zip(heads, tails, counts, strict=True)]


def _all(data: bytes, length: int, size: int, group: Any) -> list[bytes]:
    """So many bytes of every rank."""
    mine = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty(length, dtype=torch.uint8, device="cpu") for _ in range(size)]
    work = dist.all_gather(everyone, mine, group=group, async_op=True)
    # Not by waiting for it: a thread that is still inside of torch when the process ends takes it down.
    pause = _PAUSE
    while not work.is_completed():
        time.sleep(pause)
        pause = min(2 * pause, _LONG_PAUSE)
    work.wait()  # raises what went wrong
    return [one.numpy().tobytes() for one in everyone]
