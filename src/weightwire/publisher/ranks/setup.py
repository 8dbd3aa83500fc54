"""How several ranks open a run together: which rows each one publishes, and from which weights they continue.

Only rank 0 reads and writes records. It claims the run once all weights are known to fit. Weights are never restored
from the bucket here: a rank holds only some rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from weightwire.catchup import plan
from weightwire.chain import BASE, ChainReader, ChainWriter
from weightwire.delta import State, digest
from weightwire.errors import RankFailed, WeightwireError
from weightwire.publisher.anchors import Anchors
from weightwire.publisher.capture_gate import CaptureGate
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.ranks.partition import Partition, RankHoldings, holdings_of, partition_rows
from weightwire.publisher.ranks.protocol import LATE, Meeting
from weightwire.publisher.ranks.rank_messages import EVERY_RANK, RankRun, Recalled, sum_states
from weightwire.publisher.takeover import Takeover
from weightwire.weights import Tensor, Weights, check_schema, schema_of_weights

__all__ = ["RankSession", "RankSetup", "RankShare"]


@dataclass(frozen=True)
class RankShare:
    """The tensors that this rank publishes, and its copies of them."""

    partition: Partition
    names: frozenset[str]
    copies: HostCopies[Publication]

    def own_rows(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that this rank publishes. Keeps unknown names; the schema check refuses them later."""
        return {name: one for name, one in weights.items() if name in self.names or name not in self.partition.schema}


@dataclass(frozen=True)
class RankSession:
    """A run that the ranks have opened. `own` is the state of this rank's rows, `state` that of the whole model."""

    rank_run: RankRun
    own: State | None = None
    state: State | None = None


@dataclass(frozen=True)
class _FirstPublish:
    """The first publish of this rank, which waits for those of all others."""

    holding: RankHoldings
    agreed: asyncio.Future[None]

    def end(self, problem: WeightwireError | None) -> None:
        if self.agreed.done():
            return
        if problem is not None:
            self.agreed.set_exception(problem)
        else:
            self.agreed.set_result(None)


class RankSetup:
    def __init__(self, context: PublishContext, meeting: Meeting, anchors: Anchors, gate: CaptureGate) -> None:
        self.rank_run = RankRun()
        self.writer: ChainWriter | None = None  # on rank 0
        self.share: RankShare | None = None
        self._context = context
        self._meeting = meeting
        self._anchors = anchors
        self._gate = gate
        self._takeover = Takeover(context)
        self._first: _FirstPublish | None = None

    async def start(self) -> None:
        """Rank 0 reads the run, if there is one. The first publish shows which rows each rank holds."""
        self.rank_run = await self._meeting.run_on_rank_0(
            "open", self._find() if self._meeting.is_first else None, RankRun
        )

    async def _find(self) -> RankRun:
        run = await self._takeover.probe()
        if run is None:
            return RankRun()
        head = await ChainReader(self._context.bucket, run).read_head()
        return RankRun(run, head=head.record if head else None)

    # --- rows of each rank ---------------------------------------------------------------------------------------

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None:
        """Before the first capture: waits for all ranks, to agree on the rows that each one publishes."""
        if self._context.lifecycle.failure is not None:
            raise self._context.lifecycle.failure
        if self.share is None:
            first = self._first = _FirstPublish(
                holdings_of(weights, aliases), asyncio.get_running_loop().create_future()
            )
            self._context.lifecycle.wake()
            while not (await asyncio.wait([first.agreed], timeout=LATE))[0]:
                rank = self._meeting.rank
                self._context.warn(f"rank {rank} waits for the first publish of the other ranks: {EVERY_RANK}")
            first.agreed.result()

    async def agree_on_rows(self) -> RankShare | None:
        """Waits for the first publish of all ranks. Returns this rank's share; None if all have closed."""
        while self.share is None:
            replies = await self._meeting.run_on_all("share", self._holding(), RankHoldings)
            closed = [rank for rank, one in enumerate(replies) if one.closed]
            if len(closed) == len(replies):
                return None
            if closed:
                raise RankFailed(f"rank {closed[0]} closed its publisher while others publish", hint=EVERY_RANK)
            problem: WeightwireError | None = None
            try:
                self.share = await self._make_room(partition_rows(replies), replies[self._meeting.rank])
            except WeightwireError as found:
                problem = found
            self.dismiss(problem)
        return self.share

    def dismiss(self, problem: WeightwireError | None) -> None:
        """Releases a trainer that waits for the first publish of the other ranks."""
        first, self._first = self._first, None
        if first is not None:
            first.end(problem)

    async def _holding(self) -> RankHoldings:
        while self._first is None:
            if self._context.lifecycle.closing:
                return RankHoldings(closed=True)
            await self._context.lifecycle.sleep()
        return self._first.holding

    async def _make_room(self, partition: Partition, holding: RankHoldings) -> RankShare:
        if self.rank_run.run is not None:
            self._takeover.check_schema(partition.schema, self.rank_run.run)
        names = partition.names[self._meeting.rank]
        mine = {name: kind for name, kind in partition.schema.items() if name in names}
        rows = {name: found for name in mine if (found := holding.pieces[name].rows)}
        copies = await self._context.runtime.run_in_thread(self._takeover.allocate, mine, rows, self._gate)
        return RankShare(partition, names, copies)

    # --- the run and its published weights -----------------------------------------------------------------------

    async def begin(self, share: RankShare) -> RankSession:
        """Claims the run and finds the published state. Without a run, the first version starts it."""
        if not self.rank_run.is_claimed:
            claim = self._claim(share.partition) if self._meeting.is_first else None
            self.rank_run = await self._meeting.run_on_rank_0("begin", claim, RankRun)
        return await self._recall(share) if self.rank_run.is_claimed else RankSession(self.rank_run)

    async def _claim(self, partition: Partition) -> RankRun:
        retry, takeover = self._context.uploader.retry, self._takeover
        if self.writer is None:
            run = self.rank_run.run or await retry(takeover.find_again)
            if run is not None:
                takeover.check_schema(partition.schema, run)
                self.writer = await retry(lambda: takeover.claim(run))
            elif self._context.settings.base is not None:
                await self.open_run(partition)
            else:
                await retry(takeover.upload_side_files)
        return _run_of(self.writer) if self.writer else RankRun()

    async def open_run(self, partition: Partition) -> ChainWriter:
        """On rank 0: opens the run, or starts it if there is none."""
        if self.writer is None:
            self.writer = await self._context.uploader.retry(
                lambda: self._takeover.start_run(partition.schema, partition.aliases)
            )
        return self.writer

    async def _recall(self, share: RankShare) -> RankSession:
        """The published state, if `published` or `base` holds its weights. They are not restored from the bucket."""
        after, settings = self.rank_run.head.after if self.rank_run.head else "", self._context.settings
        for given in (settings.published, settings.base) if after else (settings.base,):
            own, whole = await self._digest_given(share, given, required=not after)
            if whole is None or after not in ("", whole.hex):
                continue
            resume = self._resume(self.writer, whole, after) if self.writer is not None else None
            self.rank_run = await self._meeting.run_on_rank_0("resume", resume, RankRun)
            return RankSession(self.rank_run, own, whole)
        if after and self._meeting.is_first:
            self._context.warn(
                "the last published weights were not given (published=): the next version is an anchor with all weights"
            )
        return RankSession(self.rank_run)

    async def _digest_given(
        self, share: RankShare, given: Weights | None, *, required: bool
    ) -> tuple[State | None, State | None]:
        """The state of this rank's rows of given weights, and of the whole model if all ranks were given them."""
        own: list[State] = []

        async def recall() -> Recalled:
            if given is None or not self._fits(share, given, required=required):
                return Recalled()
            own.append(await self._context.runtime.run_in_thread(self._copy_given, share, given))
            return Recalled({name: one.digest for name, one in own[0].tensors.items()})

        replies = [one.digests for one in await self._meeting.run_on_all("recall", recall(), Recalled)]
        everyone = [digests for digests in replies if digests is not None]
        if len(everyone) < len(replies):
            if everyone:
                self._context.warn("not all ranks were given the same published= or base= weights: they are not used")
            return None, None
        return own[0], sum_states(share.partition.schema, everyone)

    def _fits(self, share: RankShare, given: Weights, *, required: bool) -> bool:
        """Whether given weights fit the run. A base that must start the run raises instead."""
        if not required:
            return schema_of_weights(given) == share.partition.schema
        check_schema(schema_of_weights(given), share.partition.schema, where="the base")
        return True

    def _copy_given(self, share: RankShare, given: Weights) -> State:
        for name, target in share.copies.published.items():
            row = target.count // (target.rows[1] - target.rows[0]) if target.rows else 0
            begin = row * target.rows[0] if target.rows else 0
            given[name].copy_to(begin, begin + target.count, target.bits)
        return digest(share.copies.published, threads=self._context.settings.threads)

    async def _resume(self, writer: ChainWriter, whole: State, after: str) -> RankRun:
        """On rank 0: continues from this state. A run without a state starts from it."""
        if not after:
            base = {"kind": BASE, "after": whole.hex, "source": self._context.settings.source}
            commit = await self._context.uploader.retry(lambda: writer.prepare(**base))
            await writer.send(commit)
        await self._count_anchors(writer)
        return _run_of(writer)

    async def _count_anchors(self, writer: ChainWriter) -> None:
        try:
            if writer.head is not None:
                path = await plan(writer.chain, writer.head)
                self._anchors.schedule = self._anchors.schedule.after_path(path)
        except WeightwireError as problem:
            self._context.warn(f"{problem.message}; the next anchor may be late")


def _run_of(writer: ChainWriter) -> RankRun:
    return RankRun(writer.run, writer.epoch, writer.head.record if writer.head else None)
