"""6 publish, by several ranks: each diffs and uploads its own rows, and rank 0 commits them as one version.

All ranks go through the same meetings in the same order, so that what becomes of a version is the same for all: every
rank's part is of the same turn, or there is no version. Nothing is ever gathered but records.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from weightwire.bucket import Bucket
from weightwire.catchup import copy_weights
from weightwire.chain import ANCHOR, DELTA, Commit, DataFile, Sealed, seal
from weightwire.delta import Delta, State, anchor
from weightwire.errors import RankFailed, WeightwireError
from weightwire.publisher.host_copies import HostCopies
from weightwire.publisher.last_published import CopyAdvance, advance_copy
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_loop import Release, finite
from weightwire.publisher.ranks.partition import Partition, RankHoldings
from weightwire.publisher.ranks.protocol import LATE, PULSE, RankGroup
from weightwire.publisher.ranks.rank_messages import (
    EVERY_RANK,
    AnchorPart,
    Committed,
    Held,
    News,
    RankPart,
    Turn,
    change,
    different_steps,
    slowest,
)
from weightwire.publisher.ranks.setup import Joining
from weightwire.publisher.takeover import PublisherSettings
from weightwire.system import Runtime
from weightwire.telemetry import Listener
from weightwire.weights import Weights

__all__ = ["Together"]

_TAKE, _CLOSE = "take", "close"

_SOON = 0.5  # seconds between two looks at an anchor whose parts are being uploaded


@dataclass
class _Making:
    """A part of a version under way: the state of this rank's rows after it, and the way back."""

    own: State | None = None
    rolled: CopyAdvance | None = None
    spool: ExitStack = field(default_factory=ExitStack)


@dataclass
class _Offer:
    """Weights that a trainer offers, which waits until it is `over`."""

    publication: Publication
    weights: Weights
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Taken:
    """What this rank has of a turn."""

    publication: Publication | None = None
    weights: Weights = field(default_factory=dict)
    offer: _Offer | None = None

    def end(self, failure: WeightwireError | None) -> None:
        """Whatever happened: nobody waits for ever."""
        if self.publication is not None and not self.publication.done:
            self.publication.fail(failure or WeightwireError("the publisher was interrupted", hint="make a new one"))
        if self.offer is not None:
            self.offer.over.set()


class Together(Joining):
    """One rank's work. Captures are counted, by turn: all ranks publish the same one."""

    def __init__(
        self, bucket: Bucket, runtime: Runtime, settings: PublisherSettings, emit: Listener, ranks: RankGroup
    ) -> None:
        super().__init__(bucket, runtime, settings, emit, ranks)
        self._turn = 0  # how often the trainer has called publish
        self._settled = 0  # the turn that all ranks have taken, or given up
        self._missed = 0  # the turn of the last publish that failed here
        self._offer: _Offer | None = None
        self._anchor_wanted = False
        self._uploaded: list[AnchorPart] = []  # which the others have not heard of
        self._anchor: tuple[Commit, dict[int, AnchorPart]] | None = None  # of which rank 0 collects the parts

    # --- the trainer's side --------------------------------------------------------------------------------------

    def _count_turn(self) -> int:
        self._turn += 1
        return self._turn

    def skip(self) -> None:
        """A publish that failed before anything was captured. It counts, as it may not have failed everywhere."""
        self._miss(self._count_turn())

    def _miss(self, turn: int) -> None:
        if self.copies is not None:
            self._missed = turn
            self.copies.skip(turn)

    async def _make_room(self, sharing: Partition, holding: RankHoldings) -> None:
        await super()._make_room(sharing, holding)
        if self._turn:  # all that came before this one have failed
            self._miss(self._turn)

    def catch_up(self) -> None:
        """Before the next one is captured: one that failed here must have been given up by all."""
        while self._missed > self._settled and self.failure is None:
            time.sleep(0.01)

    def _capture(self, copies: HostCopies[Publication], publication: Publication, weights: Weights) -> None:
        publication.turn = self._count_turn()
        try:
            copies.capture(weights, publication, publication.turn)
        except BaseException:
            self._miss(publication.turn)
            raise

    async def publish_now(self, publication: Publication, weights: Weights) -> None:
        async with self._alone:
            publication.turn = self._count_turn()
            if self.failure is not None:
                publication.fail(self.failure)
                return
            self._offer = offer = _Offer(publication, weights)
            self.wake()
            try:
                await offer.over.wait()
            except asyncio.CancelledError:
                publication.check = _interrupted
                if self._offer is offer:  # which nobody has begun to read
                    self._offer = None
                    self._miss(publication.turn)
                    publication.fail(WeightwireError("the publish was interrupted"))
                raise

    def _give_up(self, publication: Publication, problem: WeightwireError) -> None:
        if problem is self.failure:  # which has been told, and there is no next one
            publication.fail(problem)
        else:
            super()._give_up(publication, problem)

    # --- rounds --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._ranks.close()
            self._dismiss()

    async def _run(self) -> None:
        try:
            if await self._share():
                while await self._next() == _TAKE:
                    await self._publish_next()
            await self._leave()
            if not self._closing:
                self.failure = self.failure or WeightwireError("rank 0 has closed this publisher", hint=EVERY_RANK)
        except RankFailed as problem:
            self.failure = self.failure or problem
            self._warn(problem.message)
        self._ranks.close()
        self._dismiss()
        self.wake()
        await super()._run()  # which fails whatever may still come

    def _dismiss(self) -> None:
        """Lets go of a trainer that waits for the other ranks."""
        problem = self.failure or WeightwireError("the publisher was closed before this was published")
        if self.copies is not None:
            self.copies.let(None)
        if self._first is not None and not self._first[1].done():
            self._first[1].set_exception(problem)
        if self._offer is not None:
            self._offer.publication.fail(problem)
            self._offer.over.set()
        self._first = self._offer = None

    async def _next(self) -> str:
        """What rank 0 wants all to do, once it wants something."""
        others_wait = False
        while True:
            if self.is_first and not (self._is_waiting or others_wait or self._closing):
                await self._woken(PULSE if self._anchor is None else _SOON)
            go = _TAKE if self._is_waiting or others_wait else _CLOSE if self._closing else ""
            uploaded, self._uploaded = tuple(self._uploaded), []
            news = News(go if self.is_first else "", self._is_waiting, uploaded)
            said = await self._meeting.tell("next", news)
            others_wait = any(one.waiting for one in said)
            self._collect(said)
            if said[0].go:
                return said[0].go

    @property
    def _is_waiting(self) -> bool:
        captured = self.copies is not None and self.copies.waiting
        return captured or self._offer is not None or self._missed > self._settled

    async def _publish_next(self) -> None:
        assert self.copies is not None
        taken = _Taken()
        try:
            # Before anything is taken: while this waits for the bucket, captures must not wait for this.
            begun = await self._begin_together()
            problem = await self._take_together(taken) or begun
            if taken.publication is None:
                return
            if problem is not None:
                self._give_up(taken.publication, problem)
            else:
                await self.publish(taken.publication, taken.weights, self.copies.release, self.copies.release_all)
        except RankFailed as problem:
            self.failure = self.failure or problem
            raise
        finally:
            self.copies.release_all()
            taken.end(self.failure)

    async def _take_together(self, taken: _Taken) -> WeightwireError | None:
        """The same turn on every rank: the newest that any of them has. Returns why one of them does not have it."""
        assert self.copies is not None
        turn = 0
        try:
            held = self._turn if self._settings.blocking else await self._runtime.run_in_thread(self.copies.hold)
            turn = max(one.turn for one in await self._meeting.tell("turn", Turn(held)))
            said = await self._meet("take", self._take(turn, taken), Turn)
        except RankFailed:
            raise
        except WeightwireError as problem:
            return problem
        finally:
            self._settled = max(self._settled, turn)
            self.copies.let(None)
        return different_steps(said)

    async def _take(self, turn: int, taken: _Taken) -> Turn:
        assert self.copies is not None
        # Those that are there have done all that others need to get there.
        self.copies.let(turn)
        problem: WeightwireError | None = None
        while not self._has_reached(turn) and problem is None:
            late = not await self._woken(0 if self._closing else LATE)
            problem = self._never_comes(turn, late)
        await self._runtime.run_in_thread(self._take_into, taken)  # it may be an older one, which can only fail
        if problem is not None:
            raise problem
        if taken.publication is None or taken.publication.turn != turn:
            raise WeightwireError(f"publish {turn} failed there, so that its version would be a mixture")
        return Turn(turn, taken.publication.step)

    def _never_comes(self, turn: int, late: bool) -> WeightwireError | None:
        """Why the trainer will never publish this turn; it may just be late."""
        assert self.copies is not None
        if self._has_reached(turn):
            return None
        if self._closing:
            what = f"closed its publisher after publish {self._turn}, and others have gone on to publish {turn}"
            return WeightwireError(what, hint=EVERY_RANK)
        pending = self.copies.pending
        if late and pending is not None and pending.waiters:
            what = f"waits for publish {pending.turn}, and others have gone on to publish {turn}"
            return WeightwireError(what, hint="wait on every rank, or on none")
        if late:
            self._warn(f"rank {self._ranks.rank} has not published yet what others have: {EVERY_RANK}")
        return None

    def _has_reached(self, turn: int) -> bool:
        assert self.copies is not None
        return self._turn >= turn if self._settings.blocking else self.copies.reached(turn)

    def _take_into(self, taken: _Taken) -> None:
        assert self.copies is not None
        if not self._settings.blocking:
            taken.publication, taken.weights = self.copies.take(), self.copies.latest
        elif self._offer is not None:
            taken.offer, self._offer = self._offer, None
            taken.publication, taken.weights = taken.offer.publication, taken.offer.weights

    # --- versions ------------------------------------------------------------------------------------------------

    async def _attempt(self, publication: Publication, weights: Weights, release: Release) -> Sealed[Commit]:
        making = _Making()
        try:
            parts = await self._meet("part", self._make_part(making, publication, weights, release), RankPart)
            whole = self._sum([one.added for one in parts], self.state)
            commit = self._commit(publication, parts, whole) if self.is_first else None
            committed = await self._hear("commit", commit, Committed)
        except BaseException:
            if making.rolled is not None:
                await self._runtime.run_in_thread(making.rolled.undo)
            raise
        finally:
            making.spool.close()
        self._own, self.state = making.own, whole
        self._held = Held(self._held.run, self._held.epoch, committed.commit)
        self._anchor_wanted = committed.anchor
        return seal(committed.commit)

    async def _make_part(
        self, making: _Making, publication: Publication, weights: Weights, release: Release
    ) -> RankPart:
        assert self.copies is not None
        assert self.version is not None
        version, kind = self.version + 1, ANCHOR if self._own is None else DELTA
        weights = self.copies.check(weights)
        async with self._stage("encode", version) as encoding:
            made = await (
                self._make_anchor(making, publication, weights)
                if self._own is None
                else self._make_delta(making, self._own, publication, weights, release)
            )
            encoding.nbytes = made.nbytes
        before = self._own or State({})
        making.own = made.advance(before)
        stages = {**publication.stages, "encode": encoding.stage}
        files: tuple[DataFile, ...] = ()
        if made.entries:
            async with self._stage("upload", version) as uploading:
                uploading.nbytes = made.nbytes
                file = await self._uploads.name(kind, version, self._held.epoch, made, self._ranks.rank)
                await self._uploads.patiently(lambda: self._uploads.put(file, made))
            files, stages["upload"] = (file,), uploading.stage
        added = {name: change(before, entry.state, name) for name, entry in made.entries.items()}
        return RankPart(added, made.changed if kind == DELTA else 0, files, stages)

    async def _make_anchor(self, making: _Making, publication: Publication, weights: Weights) -> Delta:
        assert self.copies is not None
        await self._runtime.run_in_thread(copy_weights, weights, self.copies.published)
        self.copies.release_all()
        publication.check()
        return await self._runtime.run_in_thread(self._encode_part, making.spool)

    async def _make_delta(
        self, making: _Making, own: State, publication: Publication, weights: Weights, release: Release
    ) -> Delta:
        assert self.copies is not None
        threads = self._settings.threads

        def move() -> None:
            assert self.copies is not None
            making.rolled = advance_copy(self.copies.published, weights, threads=threads, done=release)

        await self._runtime.run_in_thread(move)
        publication.check()
        assert making.rolled is not None
        return await self._runtime.run_in_thread(making.rolled.diff, own, threads=threads, part=True)

    def _encode_part(self, spools: ExitStack) -> Delta:
        assert self.copies is not None
        spool = spools.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed with the others)
        return anchor(self.copies.published, spool=spool, threads=self._settings.threads, part=True)

    async def _commit(self, publication: Publication, parts: Sequence[RankPart], whole: State) -> Committed:
        writer = self.writer
        assert writer is not None
        fields = {
            "kind": ANCHOR if self.state is None else DELTA,
            "after": whole.hex,
            "changed": sum(one.changed for one in parts),
            "step": publication.step,
            "metrics": finite(publication.metrics),
            "stages": slowest([one.stages for one in parts]),
            "files": tuple(file for one in parts for file in one.files),
        }
        commit = await self._uploads.patiently(lambda: writer.prepare(**fields))
        await self._send(writer, commit)
        self._count(commit.record)
        return Committed(commit.record, self._anchor is None and self._anchor_is_due())

    # --- anchors -------------------------------------------------------------------------------------------------

    async def _after(self, commit: Sealed[Commit]) -> None:
        if self.writer is not None:
            self._hint(self.writer)
        if self._anchor_wanted:
            self._anchor_wanted = False
            await self._add_part_of_anchor(commit.record)

    async def _add_part_of_anchor(self, commit: Commit) -> None:
        """As a whole anchor is added; the others hear of it at one of the next meetings."""
        if self.is_first:
            self._since_anchor, self._versions_since_anchor = 0, 0
            self._anchor = commit, {}
        spool = ExitStack()
        try:
            async with self._stage("encode", commit.version) as encoding:
                made = await self._runtime.run_in_thread(self._encode_part, spool)
                encoding.nbytes = made.nbytes
        except BaseException as problem:
            spool.close()
            if not isinstance(problem, WeightwireError | OSError | MemoryError):
                raise
            self._warn(f"no anchor for version {commit.version} ({problem})")
            self._uploaded.append(AnchorPart(commit.version, failed=True))
            return
        self.go_behind(self._upload_part_of_anchor(commit.version, made, spool), "anchor")

    async def _upload_part_of_anchor(self, version: int, made: Delta, spool: ExitStack) -> None:
        part = AnchorPart(version, failed=True)
        try:
            if made.entries:
                file = await self._uploads.name(ANCHOR, version, self._held.epoch, made, self._ranks.rank)
                await self._uploads.put(file, made)
            part = AnchorPart(version, (file,) if made.entries else ())
        except WeightwireError as problem:
            self._warn(f"no anchor for version {version} ({problem.message})")
        finally:
            spool.close()
            self._uploaded.append(part)

    def _collect(self, said: Sequence[News]) -> None:
        """On rank 0: once all parts of an anchor are there, it can be named."""
        if self._anchor is None:
            return
        commit, parts = self._anchor
        for rank, one in enumerate(said):
            for part in one.anchors:
                if part.version == commit.version:
                    parts[rank] = part
        if len(parts) < self._ranks.size:
            return
        self._anchor = None
        if not any(part.failed for part in parts.values()):
            files = tuple(file for rank in sorted(parts) for file in parts[rank].files)
            self.go_behind(self._name_anchor(commit, files), "shortcut")

    async def _name_anchor(self, commit: Commit, files: tuple[DataFile, ...]) -> None:
        try:
            await self._add_shortcut(commit, files)
        except WeightwireError as problem:
            self._warn(f"no anchor for version {commit.version} ({problem.message})")

    async def _leave(self) -> None:
        """The last meeting: what is still being uploaded is waited for."""
        self._collect(await self._meet("leave", self._last_news(), News))

    async def _last_news(self) -> News:
        uploads = [task for task in self._behind if task.get_name() == "anchor"]
        if uploads:
            await asyncio.wait(uploads)
        return News(anchors=tuple(self._uploaded))


def _interrupted() -> None:
    raise WeightwireError("the publish was interrupted")
