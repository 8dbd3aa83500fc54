"""How the ranks of one publisher talk to each other: what they need for it, and how they meet.

Every rank does the same things in the same order. Knows bytes and errors; no weights, no bucket, and not what a
meeting is about.
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
"""Seconds after which a rank that still works says so: one that says nothing at all is gone."""

LATE = 30.0
"""Seconds after which a rank that waits for the trainer of another says so."""

_RESTART = "restart all ranks: the publisher goes on from what was committed last"


class RankGroup(Protocol):
    """Processes that publish one model together, each its own rows. `weightwire.trainers.torch.Ranks` is one.

    A `Publisher` that is given one closes it.
    """

    @property
    def rank(self) -> int:
        """Which one this is, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    async def gather(self, data: bytes) -> list[bytes]:
        """What every rank has to say, by rank: once all of them have said it.

        Raises RankFailed if one is gone, or says nothing for so long that it must be.
        """
        ...

    def close(self) -> None:
        """This rank says nothing more: others that wait for it are told. Twice is harmless."""
        ...


class _RankProblem(msgspec.Struct, frozen=True):
    """Why a rank could not do its part."""

    code: str
    message: str
    hint: str | None


class _Said(msgspec.Struct, frozen=True):
    about: str
    done: bool = True
    message: bytes = b""
    problem: _RankProblem | None = None


class Meeting:
    """Where all ranks come together, one subject after the other."""

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
        """That this is rank 0, which alone reads and writes records."""
        return self._ranks.rank == 0

    def leave(self) -> None:
        """Others that wait for this rank are told."""
        self._ranks.close()

    async def tell(self, about: str, message: Message) -> list[Message]:
        """What all have to say at this moment, by rank."""
        said = await self._gather(_Said(about, message=_encode(message)))
        return [_decode(one, type(message)) for one in said]

    async def meet(self, about: str, work: Coroutine[Any, Any, Message], kind: type[Message]) -> list[Message]:
        """Every rank does some work; returns what came of it, by rank.

        If one fails then all of them do, at the same point and for the same reason; what others have not finished is
        cancelled.
        """
        return [_decode(one, kind) for one in await self._meet(about, work)]

    async def hear(self, about: str, work: Coroutine[Any, Any, Message] | None, kind: type[Message]) -> Message:
        """Rank 0 does some work, and all hear what came of it."""
        said = await self._meet(about, _nothing() if work is None else work)
        return _decode(said[0], kind)

    async def _meet(self, about: str, work: Coroutine[Any, Any, Any]) -> list[_Said]:
        task = asyncio.ensure_future(work)
        try:
            while True:
                await asyncio.wait([task], timeout=PULSE)
                said = await self._gather(self._say(about, task))
                failed = [rank for rank, one in enumerate(said) if one.problem]
                if failed:
                    # What none can go on from comes first, or some would go on without the others.
                    self._raise(min(failed, key=lambda rank: (not _is_final(said[rank]), rank)), said, task)
                if all(one.done for one in said):
                    return said
        finally:
            await _drop(task)

    def _say(self, about: str, task: asyncio.Future[Any]) -> _Said:
        if not task.done():
            return _Said(about, done=False)
        problem = asyncio.CancelledError() if task.cancelled() else task.exception()
        if problem is None:
            return _Said(about, message=_encode(task.result()))
        if isinstance(problem, WeightwireError):
            return _Said(about, problem=_RankProblem(problem.code, problem.message, problem.hint))
        what = f"the publisher failed ({type(problem).__name__}: {problem})"
        return _Said(about, problem=_RankProblem(RankFailed.code, what, _RESTART))

    def _raise(self, rank: int, said: list[_Said], task: asyncio.Future[Any]) -> NoReturn:
        if rank == self._ranks.rank:
            task.result()
        problem = said[rank].problem
        assert problem is not None
        raise error_class(problem.code)(f"rank {rank}: {problem.message}", hint=problem.hint)

    async def _gather(self, mine: _Said) -> list[_Said]:
        everyone = await self._ranks.gather(msgspec.msgpack.encode(mine))
        said = [msgspec.msgpack.decode(one, type=_Said) for one in everyone]
        for rank, one in enumerate(said):
            if one.about != mine.about:
                here = f"rank {self._ranks.rank} is at {mine.about!r}"
                raise RankFailed(f"{here}, and rank {rank} at {one.about!r}: they are out of step", hint=_RESTART)
        return said


async def _nothing() -> None:
    return None


async def _drop(task: asyncio.Future[Any]) -> None:
    """Ends what nobody waits for any more, and forgets what came of it."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _is_final(said: _Said) -> bool:
    return said.problem is not None and said.problem.code in (Fenced.code, RankFailed.code)


def _encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(said: _Said, kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(said.message, type=kind)
