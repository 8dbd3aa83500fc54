"""How several ranks get hold of a run together: what each of them publishes, and what was published before.

Only rank 0 reads and writes records; the others hear from it. Nothing is rebuilt from the bucket: a rank has only some
rows, and needs no more. Publishes no version but a base.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from weightwire.bucket import Bucket
from weightwire.catchup import plan, schema_of
from weightwire.chain import BASE, ChainWriter, Run
from weightwire.codec import Digest
from weightwire.delta import State, TensorState, add, digest
from weightwire.errors import RankFailed, WeightwireError
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.ranks.partition import Partition, RankHoldings, holdings_of, partition_rows
from weightwire.publisher.ranks.protocol import LATE, Meeting, RankGroup
from weightwire.publisher.ranks.rank_messages import EVERY_RANK, Held, Recalled
from weightwire.publisher.takeover import PublisherSettings, check_schema
from weightwire.publisher.upload import Dropped
from weightwire.system import Runtime
from weightwire.telemetry import Listener
from weightwire.weights import Dtype, Tensor, Weights, schema_of_weights

__all__ = ["Joining"]

Message = TypeVar("Message")


class Joining(PublishLoop):
    """One rank's hold on a run. `_own` is the state of its rows, `state` that of all."""

    def __init__(
        self, bucket: Bucket, runtime: Runtime, settings: PublisherSettings, emit: Listener, ranks: RankGroup
    ) -> None:
        super().__init__(bucket, runtime, settings, emit)
        self._ranks = ranks
        self._meeting = Meeting(ranks)
        self._held = Held()
        self._sharing: Partition | None = None
        self._first: tuple[RankHoldings, asyncio.Future[None]] | None = (
            None  # a first publish, which waits for all others'
        )
        self._own: State | None = None  # of the rows in `copies.published`
        self._recalled = False

    @property
    def is_first(self) -> bool:
        return self._ranks.rank == 0

    @property
    def run_record(self) -> Run | None:
        return self._held.run

    @property
    def version(self) -> int | None:
        return self._held.head.version if self._held.head else None

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Rank 0 takes over the run, if there is one. What each rank is to hold of it the first publish shows."""
        self._held = await self._hear("open", self._claim() if self.is_first else None, Held)

    async def _claim(self) -> Held:
        self.writer = await self._opening.claim()
        return self._hold_of(self.writer)

    def _hold_of(self, writer: ChainWriter | None) -> Held:
        return Held(writer.run, writer.epoch, writer.head.record if writer.head else None) if writer else Held()

    @property
    def dtypes(self) -> dict[str, Dtype]:
        known = schema_of(self._held.run) if self._held.run else {}
        schema = self._sharing.schema if self._sharing else known
        return {name: dtype for name, (dtype, _) in schema.items()}

    @property
    def joined(self) -> bool:
        """That every rank knows what it is to publish."""
        return self._sharing is not None

    async def join(self, weights: Weights, aliases: Mapping[str, str]) -> None:
        """Before the first capture: waits for that of all others, to share out what is to be published."""
        if self.failure is not None:
            raise self.failure
        if self._sharing is None:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._first = holdings_of(weights, aliases), waiting
            self.wake()
            while not (await asyncio.wait([waiting], timeout=LATE))[0]:
                self._warn(f"rank {self._ranks.rank} waits for the first publish of all others: {EVERY_RANK}")
            waiting.result()

    def mine(self, weights: Weights) -> dict[str, Tensor]:
        """What this rank publishes of what it holds."""
        assert self._sharing is not None
        mine, all_names = self._sharing.names[self._ranks.rank], self._sharing.schema
        return {name: weights[name] for name in weights if name in mine or name not in all_names}

    async def _share(self) -> bool:
        """Until all ranks have published, or all have closed."""
        while True:
            said = await self._meet("share", self._holding(), RankHoldings)
            closed = [rank for rank, one in enumerate(said) if one.closed]
            if len(closed) == len(said):
                return False
            if closed:
                raise RankFailed(f"rank {closed[0]} closed its publisher, and others publish", hint=EVERY_RANK)
            assert self._first is not None
            (_, waiting), self._first = self._first, None
            try:
                await self._make_room(partition_rows(said), said[self._ranks.rank])
            except WeightwireError as problem:
                if not waiting.done():
                    waiting.set_exception(problem)
                continue
            if not waiting.done():
                waiting.set_result(None)
            return True

    async def _holding(self) -> RankHoldings:
        while self._first is None:
            if self._closing:
                return RankHoldings(closed=True)
            await self._woken(None)
        return self._first[0]

    async def _make_room(self, sharing: Partition, holding: RankHoldings) -> None:
        if self._held.run is not None:
            check_schema(sharing.schema, schema_of(self._held.run), self.bucket.url)
        mine = {name: kind for name, kind in sharing.schema.items() if name in sharing.names[self._ranks.rank]}
        rows = {name: found for name in mine if (found := holding.pieces[name].rows)}
        self.copies = await self._runtime.run_in_thread(self._opening.allocate, mine, rows)
        self._sharing = sharing

    async def _begin_together(self) -> WeightwireError | None:
        """Starts the run and finds what was published, unless that has been done. Returns what keeps it from it."""
        if self.failure is not None:
            return self.failure
        try:
            if self._held.run is None:
                self._held = await self._hear("begin", self._begin_run() if self.is_first else None, Held)
            if not self._recalled:
                await self._recall()
                self._recalled = True
        except RankFailed:
            raise
        except WeightwireError as problem:
            return problem
        return None

    async def _begin_run(self) -> Held:
        sharing = self._sharing
        assert sharing is not None
        begin = self._opening.begin_with_nothing
        self.writer = await self._start_run(lambda: begin(sharing.schema, sharing.aliases))
        return self._hold_of(self.writer)

    # --- what was published --------------------------------------------------------------------------------------

    async def _recall(self) -> None:
        """The published state, from weights that were given, if it is theirs. It is not rebuilt from the bucket."""
        head = self._held.head
        assert head is not None
        for given in (self._settings.published, self._settings.base) if head.after else (self._settings.base,):
            own, whole = await self._digest_given(given)
            if whole is not None and not head.after:
                self._held = await self._hear("base", self._commit_base(whole) if self.is_first else None, Held)
            if whole is not None and head.after in ("", whole.hex):
                await self._hear("count", self._count_anchors() if self.is_first else None, type(None))
                self._own, self.state = own, whole
                return
        if head.after and self.is_first:
            self._warn("what was published last is not at hand: the next version is an anchor, of all weights")

    async def _digest_given(self, given: Weights | None) -> tuple[State | None, State | None]:
        """Of given weights: the state of this rank's rows, and of the whole if all ranks were given it."""
        own: list[State] = []

        async def recall() -> Recalled:
            if given is None or not self._fits(given):
                return Recalled()
            own.append(await self._runtime.run_in_thread(self._copy_given, given))
            return Recalled({name: one.digest for name, one in own[0].tensors.items()})

        said = [one.digests for one in await self._meet("recall", recall(), Recalled)]
        everyone = [digests for digests in said if digests is not None]
        if len(everyone) < len(said):
            if everyone:
                self._warn("not all ranks were given the same weights to begin with: they are not used")
            return None, None
        return own[0], self._sum(everyone)

    def _fits(self, given: Weights) -> bool:
        """Other weights than the run's are of no use; but a run that is to begin with them must not begin without."""
        assert self._sharing is not None
        if self._held.head is not None and self._held.head.after:
            return schema_of_weights(given) == self._sharing.schema
        check_schema(schema_of_weights(given), self._sharing.schema, self.bucket.url)
        return True

    def _copy_given(self, given: Weights) -> State:
        assert self.copies is not None
        for name, target in self.copies.published.items():
            row = target.count // (target.rows[1] - target.rows[0]) if target.rows else 0
            begin = row * target.rows[0] if target.rows else 0
            given[name].copy_to(begin, begin + target.count, target.bits)
        return digest(self.copies.published, threads=self._settings.threads)

    def _sum(self, digests: Sequence[Mapping[str, Digest]], known: State | None = None) -> State:
        """The state of the whole, from what each rank adds to it."""
        assert self._sharing is not None
        sums = {name: one.digest for name, one in known.tensors.items()} if known else {}
        for name, lanes in ((name, lanes) for one in digests for name, lanes in one.items()):
            sums[name] = add(sums.get(name, (0, 0)), lanes)
        return State({name: TensorState(*kind, sums.get(name, (0, 0))) for name, kind in self._sharing.schema.items()})

    async def _commit_base(self, whole: State) -> Held:
        writer = self.writer
        assert writer is not None

        async def commit() -> None:
            fields = {"kind": BASE, "after": whole.hex, "source": self._settings.source}
            await writer.send(await writer.prepare(**fields))

        await self._start_run(commit)
        return self._hold_of(writer)

    async def _count_anchors(self) -> None:
        assert self.writer is not None
        assert self.writer.head is not None
        try:
            self._count_from(await plan(self.writer.chain, self.writer.head))
        except WeightwireError as problem:
            self._warn(f"{problem.message}; the next anchor comes when it comes")

    # --- meetings ------------------------------------------------------------------------------------------------

    async def _meet(self, about: str, work: Coroutine[Any, Any, Message], kind: type[Message]) -> list[Message]:
        return await self._meeting.meet(about, _undropped(work), kind)

    async def _hear(self, about: str, work: Coroutine[Any, Any, Message] | None, kind: type[Message]) -> Message:
        return await self._meeting.hear(about, _undropped(work) if work else None, kind)

    async def _woken(self, seconds: float | None) -> bool:
        """Until something has happened, or so many seconds have passed: then it is False."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True


async def _undropped(work: Coroutine[Any, Any, Message]) -> Message:
    """What was given up fails for the reason why."""
    try:
        return await work
    except Dropped as dropped:
        problem = dropped.problem
    raise problem
