"""An anchor of several ranks: each uploads its own rows, and rank 0 records it once all parts are uploaded."""

from __future__ import annotations

from collections.abc import Sequence

from weightwire.chain import Commit
from weightwire.publisher.anchors import Anchors, EncodedAnchor
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.ranks.protocol import Meeting
from weightwire.publisher.ranks.rank_messages import AnchorPart, News
from weightwire.weights import Weights

__all__ = ["AnchorParts"]


class AnchorParts:
    def __init__(self, context: PublishContext, meeting: Meeting, anchors: Anchors) -> None:
        self._context = context
        self._meeting = meeting
        self._anchors = anchors
        self._uploaded: list[AnchorPart] = []  # not yet announced to the others
        self._collected: tuple[Commit, dict[int, AnchorPart]] | None = (
            None  # on rank 0: the version of an anchor, and its parts so far
        )

    @property
    def is_collecting(self) -> bool:
        return self._collected is not None

    def count(self, commit: Commit, weights_bytes: int) -> bool:
        """On rank 0: counts a version. Returns whether an anchor of it is due."""
        self._anchors.schedule = self._anchors.schedule.after_commit(commit)
        return not self.is_collecting and self._anchors.is_due(weights_bytes)

    async def add(self, commit: Commit, published: Weights) -> None:
        """Encodes this rank's part and uploads it in the background. A later meeting announces it."""
        if self._meeting.is_first:
            self._anchors.schedule = self._anchors.schedule.restarted()
            self._collected = commit, {}
        made = await self._anchors.encode(commit, published, part=True)
        if made is None:
            self._uploaded.append(AnchorPart(commit.version, failed=True))
        else:
            self._context.background.start(self._upload(commit, made), "anchor")

    async def _upload(self, commit: Commit, made: EncodedAnchor) -> None:
        part = AnchorPart(commit.version, failed=True)
        try:
            if not made.data.stacks:
                made.spool.close()
                part = AnchorPart(commit.version)
            elif (file := await self._anchors.upload(commit, made, self._meeting.rank)) is not None:
                part = AnchorPart(commit.version, (file,))
        finally:
            self._uploaded.append(part)

    def pop_uploaded(self) -> tuple[AnchorPart, ...]:
        """The parts uploaded since the last call."""
        uploaded, self._uploaded = tuple(self._uploaded), []
        return uploaded

    async def take_last_news(self) -> News:
        """Waits for uploads in progress, then returns the last news."""
        await self._context.background.wait("anchor")
        return News(anchors=self.pop_uploaded())

    def collect(self, replies: Sequence[News]) -> None:
        """On rank 0: records an anchor once all of its parts are uploaded."""
        if self._collected is None:
            return
        commit, parts = self._collected
        for rank, one in enumerate(replies):
            for part in one.anchors:
                if part.version == commit.version:
                    parts[rank] = part
        if len(parts) < self._meeting.size:
            return
        self._collected = None
        if not any(part.failed for part in parts.values()):
            files = tuple(file for rank in sorted(parts) for file in parts[rank].files)
            self._context.background.start(self._anchors.record(commit, files), "shortcut")
