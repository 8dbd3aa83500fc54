"""A version of several ranks: each encodes and uploads its own rows, and rank 0 commits them together.

If one rank fails nothing is committed, and all ranks continue from the previous version. Only records are gathered,
never weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from weightwire.chain import ANCHOR, DELTA
from weightwire.delta import State, subtract_digests
from weightwire.errors import NotPublished
from weightwire.publisher.encoded_version import (
    FIRST_EPOCH,
    FIRST_VERSION,
    EncodedVersion,
    encode_version,
    upload_version,
)
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_process import Taken
from weightwire.publisher.ranks.anchor_parts import AnchorParts
from weightwire.publisher.ranks.partition import Partition
from weightwire.publisher.ranks.protocol import Meeting
from weightwire.publisher.ranks.rank_messages import Committed, RankPart, RankRun, slowest, sum_states
from weightwire.publisher.ranks.setup import RankSession, RankSetup

__all__ = ["VersionParts"]


class VersionParts:
    def __init__(self, context: PublishContext, meeting: Meeting, setup: RankSetup, anchors: AnchorParts) -> None:
        self._context = context
        self._meeting = meeting
        self._setup = setup
        self._anchors = anchors

    async def make(self, session: RankSession, partition: Partition, taken: Taken) -> tuple[RankSession, Committed]:
        """Makes a version, on all ranks together."""
        encoded: list[EncodedVersion] = []
        async with AsyncExitStack() as giving_up:
            part = self._make_part(session, taken, encoded, giving_up)
            parts = await self._meeting.run_on_all("part", part, RankPart)
            whole = sum_states(partition.schema, [one.added for one in parts], session.state)
            commit = self._commit(session, partition, taken, parts, whole) if self._meeting.is_first else None
            committed = await self._meeting.run_on_rank_0("commit", commit, Committed)
        rank_run = RankRun(committed.run or session.rank_run.run, committed.commit.epoch, committed.commit)
        return RankSession(rank_run, encoded[0].after, whole), committed

    async def _make_part(
        self, session: RankSession, taken: Taken, encoded: list[EncodedVersion], giving_up: AsyncExitStack
    ) -> RankPart:
        context = self._context
        version, epoch = _place(session.rank_run)
        one = await giving_up.enter_async_context(encode_version(context, taken, version, session.own, part=True))
        encoded.append(one)
        files, stages = await upload_version(context, taken, one, epoch, self._meeting.rank)
        before = session.own.tensors if session.own else {}
        known = {name: before[name].digest if name in before else (0, 0) for name in one.data.entries}
        added = {name: subtract_digests(one.after.tensors[name].digest, known[name]) for name in known}
        return RankPart(added, one.data.changed if one.kind == DELTA else 0, files, stages)

    async def _commit(
        self, session: RankSession, partition: Partition, taken: Taken, parts: Sequence[RankPart], whole: State
    ) -> Committed:
        writer = await self._setup.open_run(partition)
        if (writer.next_version, writer.epoch) != _place(session.rank_run):
            raise NotPublished("another publisher started the run at the same time", hint="publish again")
        fields = {
            "kind": ANCHOR if session.state is None else DELTA,
            "after": whole.hex,
            "changed": sum(one.changed for one in parts),
            "step": taken.publication.step,
            "metrics": taken.publication.metrics,
            "stages": slowest([one.stages for one in parts]),
            "files": tuple(file for one in parts for file in one.files),
        }
        uploader = self._context.uploader
        commit = await uploader.retry(lambda: writer.prepare(**fields), lambda: taken.copies.waiting)
        async with self._context.stage("commit", commit.record.version):
            await writer.send(commit)
        started = None if session.rank_run.is_claimed else writer.run
        return Committed(commit.record, self._anchors.count(commit.record, writer.run.nbytes), started)


def _place(rank_run: RankRun) -> tuple[int, int]:
    """The version and epoch in the path of data. A new run is started after the data of all ranks is uploaded."""
    return (rank_run.head.version + 1, rank_run.epoch) if rank_run.head else (FIRST_VERSION, FIRST_EPOCH)
