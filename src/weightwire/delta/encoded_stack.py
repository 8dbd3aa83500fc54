"""Entries and stacks of a delta file: what it changes, and where the encoded blocks are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from weightwire.codec import Digest, Digests, Layout
from weightwire.delta.state import TensorState
from weightwire.weights import Dtype, Rows

__all__ = ["HASH_SIZE", "EncodedStack", "Entries", "Entry"]

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


@dataclass(frozen=True, eq=False)
class Entries(Sequence[Entry]):
    """Entries that differ only in `name`, `changed` and `digest`, in columns: there may be 100,000.

    `like` has what they share; its own `name`, `changed` and `digest` are ignored. `digests` has a row for each entry.
    """

    names: tuple[str, ...]
    like: Entry
    changed: npt.NDArray[np.uint64]
    digests: Digests | None

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Entries:
        if isinstance(entries, Entries):
            return entries
        digests = [one.digest for one in entries if one.digest is not None]
        rows = np.array(digests, np.uint64).reshape(-1, 2) if len(digests) == len(entries) else None
        changed = np.array([one.changed for one in entries], np.uint64)
        return cls(tuple(one.name for one in entries), entries[0], changed, rows)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Entry: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, at: int | slice) -> Entry | tuple[Entry, ...]:
        return self._all[at]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[Entry, ...]:
        one = self.like
        digests = [None] * len(self) if self.digests is None else map(tuple, self.digests.tolist())
        return tuple(
            Entry(name, one.dtype, one.shape, one.rows, one.coo, one.fresh, changed, digest)
            for name, changed, digest in zip(self.names, self.changed.tolist(), digests, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)  # that of a tuple, which may equal this


@dataclass(frozen=True)
class EncodedStack:
    """Entries that are encoded together. They differ only in `name`, `changed` and `digest`; most often there is one.

    `per` is the number of members in a block. `blocks` are the sizes of the encoded blocks, 0 for an unchanged one, and
    `hashes` their hashes, empty for an unchanged one. The data begins at byte `start` of the data part.
    """

    entries: Sequence[Entry]
    per: int
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    start: int = 0

    @cached_property
    def columns(self) -> Entries:
        return Entries.of(self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        return self.columns.names

    @cached_property
    def first(self) -> Entry:
        if isinstance(self.entries, Entries):
            rows, changed = self.entries.digests, int(self.entries.changed[0])
            digest = None if rows is None else (int(rows[0, 0]), int(rows[0, 1]))
            return replace(self.entries.like, name=self.entries.names[0], changed=changed, digest=digest)
        return self.entries[0]

    @property
    def kind(self) -> tuple[Dtype, tuple[int, ...]]:
        return self.first.dtype, self.first.shape

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
        return tuple(self.entries[self.place(block)])

    def place(self, block: int) -> slice:
        """The members that a block covers, by number."""
        if len(self.entries) == 1:
            return slice(0, 1)
        return slice(block * self.per, (block + 1) * self.per)
