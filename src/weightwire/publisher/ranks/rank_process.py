"""One rank of a trainer with many: it publishes its own rows, and all ranks publish the same step.

All ranks hold the same meetings in the same order, so a version has the same outcome on all of them. Either every part
belongs to the same turn, or no version is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightwire.chain import ChainWriter, Commit, Run, Sealed, seal
from weightwire.delta import State
from weightwire.errors import Closed, Fenced, RankFailed, WeightwireError
from weightwire.publisher.anchors import Anchors
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import Taken, next_capture
from weightwire.publisher.ranks.anchor_parts import AnchorParts
from weightwire.publisher.ranks.protocol import PULSE, Meeting, RankGroup
from weightwire.publisher.ranks.rank_messages import EVERY_RANK, News, RankRun
from weightwire.publisher.ranks.setup import RankSession, RankSetup, RankShare
from weightwire.publisher.ranks.turns import RankTurns
from weightwire.publisher.ranks.version_parts import VersionParts
from weightwire.weights import Dtype, Tensor, Weights

__all__ = ["RankProcess"]

_TAKE, _CLOSE = "take", "close"

_SOON = 0.5  # seconds between two checks while the parts of an anchor are being uploaded


class RankProcess:
    def __init__(self, context: PublishContext, ranks: RankGroup) -> None:
        gate = CaptureGate()
        self._context = context
        self._meeting = Meeting(ranks)
        self._anchors = Anchors(context)
        self._anchor_parts = AnchorParts(context, self._meeting, self._anchors)
        self._setup = RankSetup(context, self._meeting, self._anchors, gate)
        self._turns = RankTurns(context, self._meeting, gate)
        self._versions = VersionParts(context, self._meeting, self._setup, self._anchor_parts)
        self._session: RankSession | None = None
        self._is_anchor_wanted = False
        self._is_over = False  # the ranks hold no more meetings

    @property
    def _rank_run(self) -> RankRun:
        return self._session.rank_run if self._session else self._setup.rank_run

    @property
    def run_record(self) -> Run | None:
        return self._rank_run.run

    @property
    def version(self) -> int | None:
        return self._rank_run.head.version if self._rank_run.head else None

    @property
    def state(self) -> State | None:
        return self._session.state if self._session else None

    @property
    def dtypes(self) -> dict[str, Dtype]:
        known = self._rank_run.run.schema if self._rank_run.run else {}
        schema = self._setup.share.partition.schema if self._setup.share else known
        return {name: dtype for name, (dtype, _) in schema.items()}

    @property
    def copies(self) -> HostCopies[Publication] | None:
        return self._setup.share.copies if self._setup.share else None

    @property
    def writer(self) -> ChainWriter | None:
        return self._setup.writer

    async def start(self) -> None:
        await self._setup.start()

    # --- the trainer's side --------------------------------------------------------------------------------------

    @property
    def is_joined(self) -> bool:
        return self._setup.share is not None

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None:
        await self._setup.join(weights, aliases)

    def own_rows(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        self._turns.catch_up()
        return self._share.own_rows(weights)

    def skip(self) -> None:
        self._turns.skip()

    def capture(self, publication: Publication, weights: Weights) -> None:
        self._turns.capture(self._share.copies, publication, weights)

    async def offer(self, publication: Publication, weights: Weights) -> None:
        await self._turns.offer(publication, weights)

    @property
    def _share(self) -> RankShare:
        if self._setup.share is None:
            raise RuntimeError("call join() before the first capture")
        return self._setup.share

    # --- rounds --------------------------------------------------------------------------------------------------

    async def take(self) -> Taken | None:
        if not self._is_over:
            try:
                taken = await self._next_round()
                if taken is not None:
                    return taken
                if not self._context.lifecycle.closing:
                    self._context.lifecycle.fail(Closed("rank 0 closed this publisher", hint=EVERY_RANK))
            except RankFailed as problem:
                self._context.lifecycle.fail(problem)
                self._context.warn(problem.message)
            self.leave()
        return await next_capture(self._context, lambda: self.copies, self._why_it_is_over)

    async def _why_it_is_over(self) -> WeightwireError:
        return self._context.lifecycle.ending

    def leave(self) -> None:
        """Releases the other ranks and this rank's trainer, which may be waiting for each other."""
        self._is_over = True
        self._meeting.leave()
        self._setup.dismiss(self._context.lifecycle.ending)
        self._turns.dismiss(self._context.lifecycle.ending)
        self._context.lifecycle.wake()

    async def _next_round(self) -> Taken | None:
        """Agrees on what all ranks publish next; None when they close."""
        share = await self._setup.agree_on_rows()
        if share is not None:
            while await self._next(share.copies) == _TAKE:
                # Before anything is taken, so that captures can continue while this waits for the bucket.
                begun = await self._begin(share)
                taken = await self._turns.take(share.copies)
                if taken is not None:
                    return replace(taken, problem=taken.problem or begun)
        last_news = await self._meeting.run_on_all("leave", self._anchor_parts.take_last_news(), News)
        self._anchor_parts.collect(last_news)
        return None

    async def _next(self, copies: HostCopies[Publication]) -> str:
        """Waits for the next order of rank 0."""
        lifecycle, others_wait = self._context.lifecycle, False
        while True:
            if self._meeting.is_first and not (self._turns.is_waiting(copies) or others_wait or lifecycle.closing):
                await lifecycle.sleep(_SOON if self._anchor_parts.is_collecting else PULSE)
            is_waiting = self._turns.is_waiting(copies)
            order = _TAKE if is_waiting or others_wait else _CLOSE if lifecycle.closing else ""
            news = News(order if self._meeting.is_first else "", is_waiting, self._anchor_parts.pop_uploaded())
            replies = await self._meeting.exchange("next", news)
            others_wait = any(one.waiting for one in replies)
            self._anchor_parts.collect(replies)
            if replies[0].order:
                return replies[0].order

    async def _begin(self, share: RankShare) -> WeightwireError | None:
        """Opens the run, unless that is done. Returns the error that prevents it."""
        lifecycle = self._context.lifecycle
        if lifecycle.failure is not None or (self._session is not None and self._session.rank_run.is_claimed):
            return lifecycle.failure
        try:
            self._session = await self._setup.begin(share)
        except RankFailed:
            raise
        except WeightwireError as problem:
            if isinstance(problem, Fenced):
                lifecycle.fail(problem)
            return problem
        return None

    # --- versions ------------------------------------------------------------------------------------------------

    async def make_version(self, taken: Taken) -> Sealed[Commit]:
        if self._session is None:
            raise RuntimeError("call take() before the first version")
        self._session, committed = await self._versions.make(self._session, self._share.partition, taken)
        self._is_anchor_wanted = committed.anchor
        return seal(committed.commit)

    async def follow_up(self, commit: Sealed[Commit]) -> None:
        if self._setup.writer is not None:
            self._anchors.hint(self._setup.writer)
        if self._is_anchor_wanted:
            self._is_anchor_wanted = False
            await self._anchor_parts.add(commit.record, self._share.copies.published)
