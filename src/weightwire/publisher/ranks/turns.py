"""Numbers the captures of several ranks by turn: all ranks publish the same turn, or none does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from weightwire.errors import Interrupted, NotPublished, RankFailed, WeightwireError
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import Taken
from weightwire.publisher.ranks.protocol import LATE, Meeting
from weightwire.publisher.ranks.rank_messages import EVERY_RANK, Turn, different_steps
from weightwire.weights import Weights

__all__ = ["RankTurns"]


@dataclass(frozen=True)
class _Offer:
    """Weights of a trainer that waits until `over` is set."""

    publication: Publication
    weights: Weights
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RankTurns:
    def __init__(self, context: PublishContext, meeting: Meeting, gate: CaptureGate) -> None:
        self._context = context
        self._meeting = meeting
        self._gate = gate
        self._turn = 0  # number of publish calls of the trainer
        self._agreed = 0  # the last turn that all ranks have taken or given up
        self._missed = 0  # the turn of the last failed publish
        self._offer: _Offer | None = None

    # --- the trainer's side --------------------------------------------------------------------------------------

    def _count_turn(self) -> int:
        self._turn += 1
        return self._turn

    def skip(self) -> None:
        """Counts a publish that failed before its capture: it may have succeeded on other ranks."""
        self._miss(self._count_turn())

    def _miss(self, turn: int) -> None:
        self._missed = turn
        self._gate.skip(turn)

    def catch_up(self) -> None:
        """Waits until all ranks have given up a publish that failed here."""
        while self._missed > self._agreed and self._context.lifecycle.failure is None:
            time.sleep(0.01)

    def capture(self, copies: HostCopies[Publication], publication: Publication, weights: Weights) -> None:
        publication.turn = self._count_turn()
        try:
            copies.capture(weights, publication, publication.turn)
        except BaseException:
            self._miss(publication.turn)
            raise

    async def offer(self, publication: Publication, weights: Weights) -> None:
        """Waits until all ranks have published it, or it failed."""
        publication.turn = self._count_turn()
        if self._context.lifecycle.failure is not None:
            publication.fail(self._context.lifecycle.failure)
            return
        self._offer = offer = _Offer(publication, weights)
        self._context.lifecycle.wake()
        try:
            await offer.over.wait()
        except asyncio.CancelledError:
            publication.check = _interrupted
            if self._offer is offer:  # not taken yet
                self._offer = None
                self._miss(publication.turn)
                publication.fail(Interrupted("the publish was interrupted"))
            raise

    def dismiss(self, problem: WeightwireError) -> None:
        """Releases a trainer that waits for the other ranks."""
        self._gate.let(None)
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.publication.fail(problem)
            offer.over.set()

    # --- agreement -----------------------------------------------------------------------------------------------

    def is_waiting(self, copies: HostCopies[Publication]) -> bool:
        return copies.waiting or self._offer is not None or self._missed > self._agreed

    async def take(self, copies: HostCopies[Publication]) -> Taken | None:
        """Takes the same turn on every rank: the newest of any rank. None if this rank has no capture of it."""
        found: list[Taken] = []
        try:
            problem = await self._take_together(copies, found)
        except BaseException as failed:
            if isinstance(failed, RankFailed):
                self._context.lifecycle.fail(failed)
            for one in found:
                one.end(self._context.lifecycle.failure)
            raise
        return replace(found[0], problem=problem) if found else None

    async def _take_together(self, copies: HostCopies[Publication], found: list[Taken]) -> WeightwireError | None:
        """Returns an error if a rank does not have the agreed turn."""
        turn = 0
        try:
            turn = max(one.turn for one in await self._meeting.exchange("turn", Turn(await self._hold())))
            turns = await self._meeting.run_on_all("take", self._take(turn, copies, found), Turn)
        except RankFailed:
            raise
        except WeightwireError as problem:
            return problem
        finally:
            self._agreed = max(self._agreed, turn)
            self._gate.let(None)
        return different_steps(turns)

    async def _hold(self) -> int:
        return self._turn if self._is_blocking else await self._context.runtime.run_in_thread(self._gate.hold)

    async def _take(self, turn: int, copies: HostCopies[Publication], found: list[Taken]) -> Turn:
        # Late ranks may capture up to the agreed turn.
        self._gate.let(turn)
        problem: WeightwireError | None = None
        while not self._has_reached(turn) and problem is None:
            late = not await self._context.lifecycle.sleep(0 if self._context.lifecycle.closing else LATE)
            problem = self._never_comes(turn, copies, late)
        # May take an older turn, which fails below.
        await self._context.runtime.run_in_thread(self._take_into, copies, found)
        if problem is not None:
            raise problem
        if not found or found[0].publication.turn != turn:
            raise NotPublished(
                f"publish {turn} failed on this rank: the version would mix weights of two steps",
                hint="publish again on every rank",
            )
        if found[0].over is not None:  # without a capture, it was not checked yet
            found[0] = replace(found[0], weights=copies.check(found[0].weights))
        return Turn(turn, found[0].publication.step)

    def _never_comes(self, turn: int, copies: HostCopies[Publication], late: bool) -> WeightwireError | None:
        """Returns why the trainer will never publish this turn; None if it may just be late."""
        if self._has_reached(turn):
            return None
        rank = f"rank {self._meeting.rank}"
        if self._context.lifecycle.closing:
            what = f"{rank} closed its publisher after publish {self._turn}, but others are at publish {turn}"
            return NotPublished(what, hint=EVERY_RANK)
        pending = copies.pending
        if late and pending is not None and pending.waiters:
            what = f"{rank} waits for publish {pending.turn}, but others are at publish {turn}"
            return NotPublished(what, hint="call wait() on every rank or on none")
        if late:
            self._context.warn(f"{rank} has not published a step that others have published: {EVERY_RANK}")
        return None

    @property
    def _is_blocking(self) -> bool:
        return self._context.settings.blocking

    def _has_reached(self, turn: int) -> bool:
        return self._turn >= turn if self._is_blocking else self._gate.reached(turn)

    def _take_into(self, copies: HostCopies[Publication], found: list[Taken]) -> None:
        if not self._is_blocking:
            publication = copies.take()
            if publication is not None:
                found.append(Taken(publication, copies.latest, copies))
        elif self._offer is not None:
            offer, self._offer = self._offer, None
            found.append(Taken(offer.publication, offer.weights, copies, over=offer.over))


def _interrupted() -> None:
    raise Interrupted("the publish was interrupted")
