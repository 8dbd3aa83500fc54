"""How the ranks of one publisher communicate: all ranks hold the same meetings in the same order.

It carries messages and errors, and does not know what a meeting is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from weightwire.errors import Fenced, RankFailed, WeightwireError, error_class

__all__ = ["Meeting", "RankGroup"]

Message = TypeVar("Message")

PULSE = 10.0
"""Seconds between signs of life of a rank that is still working. A silent rank counts as lost."""

LATE = 30.0
"""Seconds after which a rank that waits for another rank's trainer warns."""

_RESTART = "restart all ranks: the publisher continues from the last commit"


class RankGroup(Protocol):
    """Processes that publish one model together, each its own rows: `weightwire.trainers.torch.Ranks`.

    The `Publisher` that gets it closes it.
    """

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    async def gather(self, data: bytes) -> list[bytes]:
        """Waits for the data of every rank and returns it, by rank.

        Raises RankFailed if a rank is lost, or silent for too long.
        """
        ...

    def close(self) -> None:
        """Leaves the group: ranks that wait for this one fail. May be called twice."""
        ...


class _RankProblem(msgspec.Struct, frozen=True):
    """The error of a rank."""

    code: str
    message: str
    hint: str | None


class _RankReply(msgspec.Struct, frozen=True):
    about: str
    done: bool = True
    message: bytes = b""
    problem: _RankProblem | None = None


class Meeting:
    """Exchanges messages between all ranks, for one subject after the other."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        return self._ranks.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that reads and writes records."""
        return self._ranks.rank == 0

    def leave(self) -> None:
        """Leaves the group: ranks that wait for this one fail."""
        self._ranks.close()

    async def exchange(self, about: str, message: Message) -> list[Message]:
        """Exchanges messages that are available now. Returns them by rank."""
        replies = await self._gather(_RankReply(about, message=_encode(message)))
        return [_decode(one, type(message)) for one in replies]

    async def run_on_all(self, about: str, work: Coroutine[Any, Any, Message], kind: type[Message]) -> list[Message]:
        """Runs work on every rank. Returns the results by rank.

        If one rank fails, all fail at the same point and with the same error. Unfinished work is cancelled.
        """
        return [_decode(one, kind) for one in await self._run(about, work)]

    async def run_on_rank_0(
        self, about: str, work: Coroutine[Any, Any, Message] | None, kind: type[Message]
    ) -> Message:
        """Runs work on rank 0 and returns its result on all ranks."""
        replies = await self._run(about, _nothing() if work is None else work)
        return _decode(replies[0], kind)

    async def _run(self, about: str, work: Coroutine[Any, Any, Any]) -> list[_RankReply]:
        task = asyncio.ensure_future(work)
        try:
            while True:
                await asyncio.wait([task], timeout=PULSE)
                replies = await self._gather(self._reply_of(about, task))
                failed = [rank for rank, one in enumerate(replies) if one.problem]
                if failed:
                    # Final errors first, or some ranks would continue without the others.
                    self._raise(min(failed, key=lambda rank: (not _is_final(replies[rank]), rank)), replies, task)
                if all(one.done for one in replies):
                    return replies
        finally:
            await _drop(task)

    def _reply_of(self, about: str, task: asyncio.Future[Any]) -> _RankReply:
        if not task.done():
            return _RankReply(about, done=False)
        problem = asyncio.CancelledError() if task.cancelled() else task.exception()
        if problem is None:
            return _RankReply(about, message=_encode(task.result()))
        if isinstance(problem, WeightwireError):
            return _RankReply(about, problem=_RankProblem(problem.code, problem.message, problem.hint))
        what = f"the publisher failed ({type(problem).__name__}: {problem})"
        return _RankReply(about, problem=_RankProblem(RankFailed.code, what, _RESTART))

    def _raise(self, rank: int, replies: list[_RankReply], task: asyncio.Future[Any]) -> NoReturn:
        if rank == self._ranks.rank:
            task.result()
        problem = replies[rank].problem
        assert problem is not None
        named = problem.message.startswith(f"rank {rank} ")
        message = problem.message if named else f"rank {rank}: {problem.message}"
        raise error_class(problem.code)(message, hint=problem.hint)

    async def _gather(self, mine: _RankReply) -> list[_RankReply]:
        everyone = await self._ranks.gather(msgspec.msgpack.encode(mine))
        replies = [msgspec.msgpack.decode(one, type=_RankReply) for one in everyone]
        for rank, one in enumerate(replies):
            if one.about != mine.about:
                here = f"rank {self._ranks.rank} is at {mine.about!r}"
                raise RankFailed(f"{here}, but rank {rank} at {one.about!r}: out of step", hint=_RESTART)
        return replies


async def _nothing() -> None:
    return None


async def _drop(task: asyncio.Future[Any]) -> None:
    """Cancels a task and ignores its outcome."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _is_final(reply: _RankReply) -> bool:
    return reply.problem is not None and reply.problem.code in (Fenced.code, RankFailed.code)


def _encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(reply: _RankReply, kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(reply.message, type=kind)
