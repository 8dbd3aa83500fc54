"""Entries and stacks of a delta file: what it changes, and where the encoded blocks are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from weightwire.codec import Digest, Layout
from weightwire.delta.state import TensorState
from weightwire.weights import Dtype, Rows

__all__ = ["HASH_SIZE", "EncodedStack", "Entry"]

HASH_SIZE = 16  # bytes of the SHA-256 of a block


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a delta file, or its rows from `rows[0]` to before `rows[1]`.

    A `fresh` entry needs no base: the tensor is new, or has another dtype or shape. `digest` is that of the covered
    rows after the change. Deltas between two complete states have none: the state proves the result.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    rows: Rows | None
    coo: bool
    fresh: bool
    changed: int
    digest: Digest | None = None

    @property
    def layout(self) -> Layout:
        """The layout of this tensor alone."""
        return Layout.of(self.dtype, self.shape, self.rows)

    def state(self, digest: Digest) -> TensorState:
        return TensorState(self.dtype, self.shape, digest)


@dataclass(frozen=True)
class EncodedStack:
    """Entries that are encoded together. They differ only in `name`, `changed` and `digest`; most often there is one.

    `per` is the number of members in a block. `blocks` are the sizes of the encoded blocks, 0 for an unchanged one, and
    `hashes` their hashes, empty for an unchanged one. The data begins at byte `start` of the data part.
    """

    entries: tuple[Entry, ...]
    per: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    start: int = 0

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def coo(self) -> bool:
        return self.first.coo

    @property
    def fresh(self) -> bool:
        return self.first.fresh

    @cached_property
    def layout(self) -> Layout:
        """The layout of all members, one behind the other."""
        one = self.first
        if len(self.entries) == 1:
            return one.layout
        return Layout.stack(one.dtype, one.shape, len(self.entries), self.per)

    @property
    def nbytes(self) -> int:
        return self.span(range(len(self.blocks)))[1] - self.start

    @property
    def label(self) -> str:
        """Names it in errors."""
        more = len(self.entries) - 1
        return f"tensor {self.first.name!r:.200}" + (f" and {more:,} more of its shape" if more else "")

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.blocks, initial=self.start))

    def span(self, blocks: range) -> tuple[int, int]:
        """The byte range of some blocks in the data part."""
        return self._starts[blocks.start], self._starts[max(blocks.start, blocks.stop)]

    def members(self, block: int) -> tuple[Entry, ...]:
        """The entries that a block covers. A large tensor has many blocks, a stack many members in a block."""
        if len(self.entries) == 1:
            return self.entries
        return self.entries[block * self.per : (block + 1) * self.per]
