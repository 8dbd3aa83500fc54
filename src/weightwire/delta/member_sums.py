"""Digests and numbers of changed units, summed over the blocks of each tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weightwire.codec import Digests
from weightwire.delta.decoder import BlockJob, MemberCounts
from weightwire.delta.encoded_stack import EncodedStack
from weightwire.delta.file import Delta

__all__ = ["MemberSums"]


class MemberSums:
    """What the blocks of a delta added to the digests of its tensors, and how many units they changed.

    Rows are the members of a stack: there may be 100,000.
    """

    def __init__(self, delta: Delta) -> None:
        self._delta = delta
        self._added = {one.first.name: np.zeros((len(one.entries), 2), np.uint64) for one in delta.stacks}
        self._changed = {one.first.name: np.zeros(len(one.entries), np.int64) for one in delta.stacks}

    def add(self, job: BlockJob, added: Digests, changed: MemberCounts) -> None:
        place = job.stack.place(job.index)
        self._added[job.stack.first.name][place] += added
        self._changed[job.stack.first.name][place] += changed

    def added(self, stack: EncodedStack) -> Digests:
        """The changes of the digests of a stack."""
        return self._added[stack.first.name]

    def check(self, before: Callable[[EncodedStack], Digests | None]) -> None:
        """Compares the numbers of changes, and the digests where the file has them and `before` knows the old ones."""
        for stack in self._delta.stacks:
            columns, changed = stack.columns, self._changed[stack.first.name]
            for at in self._different(changed.astype(np.uint64) != columns.changed):
                what = f"changes {int(changed[at]):,} weights, but claims {int(columns.changed[at]):,}"
                self._delta.corrupt(what, columns.names[at])
            if columns.digests is None or (known := before(stack)) is None:
                continue
            for at in self._different((known + self.added(stack) != columns.digests).any(1)):
                what = "the result has a wrong digest, or the base is not the right one"
                self._delta.corrupt(what, columns.names[at])

    @staticmethod
    def _different(rows: npt.NDArray[np.bool_]) -> list[int]:
        first: list[int] = np.flatnonzero(rows)[:1].tolist()
        return first
