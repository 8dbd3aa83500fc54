"""Digests and numbers of changed units, summed over the blocks of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from weightwire.codec import Digest, Digests
from weightwire.delta.decoder import BlockJob, MemberCounts
from weightwire.delta.file import Delta
from weightwire.delta.state import add_digests

__all__ = ["MemberSums"]


class MemberSums:
    """What the blocks of a delta added to the digests of its tensors, and how many units they changed."""

    def __init__(self, delta: Delta, names: Iterable[str]) -> None:
        self._delta = delta
        self._place = {name: place for place, name in enumerate(names)}
        self._added = np.zeros((len(self._place), 2), np.uint64)
        self._changed = np.zeros(len(self._place), np.int64)

    def add(self, job: BlockJob, added: Digests, changed: MemberCounts) -> None:
        first = self._place[job.members[0].name]
        place = slice(first, first + len(job.members))  # members of a block are neighbours
        self._added[place] += added
        self._changed[place] += changed

    def added(self, name: str) -> Digest:
        """The change of a tensor's digest."""
        a, b = self._added[self._place[name]].tolist()
        return a, b

    def after(self, name: str, before: Digest) -> Digest:
        """The digest of a tensor, given its digest before."""
        return add_digests(before, self.added(name))

    def check(self, before: Mapping[str, Digest]) -> None:
        """Compares the numbers of changes, and the digests of these tensors where the file has them."""
        for name, entry in self._delta.entries.items():
            changed = int(self._changed[self._place[name]])
            if changed != entry.changed:
                self._delta.corrupt(f"changes {changed:,} weights, but claims {entry.changed:,}", name)
            if entry.digest is None or name not in before:
                continue
            if self.after(name, before[name]) != entry.digest:
                self._delta.corrupt("the result has a wrong digest, or the base is not the right one", name)
