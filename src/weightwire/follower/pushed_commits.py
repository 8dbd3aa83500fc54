"""Commits that were pushed to this follower. They save requests and round trips.

Anyone may have sent one. Its data is fetched while one request confirms that the bucket has exactly this commit.
"""

from __future__ import annotations

from collections import deque

from weightwire.chain import LARGEST_COMMIT, ChainReader, Commit, Sealed
from weightwire.follower.run_position import RunPosition

__all__ = ["PushedCommits"]

_KEPT = 8  # more would only cost memory: what is dropped is found by polling


class PushedCommits:
    """Call `add` for each push. `next` returns the commit after the one held, if it was pushed."""

    def __init__(self, position: RunPosition) -> None:
        self._position = position
        self._given: deque[bytes] = deque(maxlen=_KEPT)  # unread: reading is left to looks, whose rate is limited

    def add(self, data: bytes) -> None:
        if 0 < len(data) <= LARGEST_COMMIT:
            self._given.append(data)

    async def next(self, chain: ChainReader) -> Sealed[Commit] | None:
        """The next commit, judged like one from the bucket, except that the bucket may not have it.

        Each is returned once. Commits that do not follow the one held are dropped, except later ones.
        """
        held = self._position.commit
        if held is None:
            return None
        found, waiting = None, list(self._given)
        self._given.clear()
        for data in waiting:
            pushed = await chain.read_pushed(data, held)
            if pushed is None:
                continue
            if pushed.record.version > held.record.version + 1:
                self._given.append(data)
            else:
                found = pushed
        return found
