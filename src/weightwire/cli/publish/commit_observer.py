"""Which commit a publisher sent last, and whether it was answered: an interrupted command must not guess."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from weightwire.bucket import Bucket, ForwardingBucket
from weightwire.chain import BASE, FENCE, Commit, Folder, unseal

__all__ = ["CommitObserver", "SentCommit"]


@dataclass(frozen=True)
class SentCommit:
    """A commit that was sent. Until it is answered, it may be in the bucket or arrive later."""

    version: int
    kind: str
    is_answered: bool = False

    @property
    def has_weights(self) -> bool:
        """Whether it publishes weights. A fence does not, and followers already have the base of a run."""
        return self.kind not in (FENCE, BASE)


class CommitObserver(ForwardingBucket):
    """A bucket that calls `note` with each commit before it is sent, and again when it is answered."""

    def __init__(self, inner: Bucket, note: Callable[[SentCommit], None]) -> None:
        super().__init__(inner)
        self._note = note

    async def create(self, path: str, data: bytes) -> None:
        if not path.startswith(Folder.COMMITS):
            await self._inner.create(path, data)
            return
        commit = unseal(data, Commit, path).record
        sent = SentCommit(commit.version, commit.kind)
        self._note(sent)
        # An error is not an answer: after a lost reply, even AlreadyExists may be about this commit.
        await self._inner.create(path, data)
        self._note(replace(sent, is_answered=True))
