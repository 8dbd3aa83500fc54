"""How a tensor, a range of its rows, or a stack of tensors is cut into blocks and digested (docs/FORMAT.md, "Layout").

A block holds at most 2^22 units, which keeps positions small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from weightwire.weights import Dtype

__all__ = ["BLOCK", "Layout"]

BLOCK = 1 << 22
_LINE_LEAST = 64


@dataclass(frozen=True)
class Layout:
    """`count` units in blocks of `block` units; the last block may be shorter.

    A block consists of lines of `line` units, or has no lines if it is 0. The digest is over words of `word` bytes.
    The first word has index `start`. A stack has several `members`, tensors of one shape. Its blocks hold whole
    members, and each member has its own digest.
    """

    dtype: Dtype
    count: int
    block: int
    line: int
    row: int
    word: int
    start: int
    members: int = 1

    @staticmethod
    @lru_cache(4096)  # a mixture of experts has thousands of tensors, of a few shapes
    def of(dtype: Dtype, shape: tuple[int, ...], rows: tuple[int, int] | None = None) -> Layout:
        """The layout of a whole tensor, or of its rows from `rows[0]` to before `rows[1]`."""
        unit = dtype.unit
        row = _units(dtype, shape[1:])
        word = 8 if row * unit % 8 == 0 and row else unit
        first, last = rows if rows else (0, shape[0] if shape else 1)
        count = row * (last - first) if row else _units(dtype, shape)
        line = _line(dtype, shape, row)
        return Layout(dtype, count, _block(count, line), line, row, word, first * row * unit // word)

    @staticmethod
    @lru_cache(4096)
    def stack(dtype: Dtype, shape: tuple[int, ...], members: int, per: int) -> Layout:
        """The layout of whole tensors of one shape, one behind the other, in blocks of `per` members."""
        one = Layout.of(dtype, shape)
        if members == 1:
            return one
        if not 0 < one.count * per <= BLOCK:
            raise ValueError("a block of a stack holds at least one unit, and at most 2^22")
        return replace(one, count=members * one.count, block=per * one.count, members=members)

    @property
    def segment(self) -> int:
        """The number of units with one digest: a member of a stack, or a block. The last block may have fewer."""
        return self.count // self.members if self.members > 1 else min(self.block, self.count)

    @property
    def blocks(self) -> int:
        return -(-self.count // self.block) if self.count else 0

    def span(self, index: int) -> tuple[int, int]:
        """The first unit of a block, and the last + 1."""
        return index * self.block, min(self.count, (index + 1) * self.block)

    def alone(self, index: int) -> Layout:
        """The layout of an array that holds only this block. Bytes and digest are the same."""
        begin, end = self.span(index)
        members = (end - begin) // self.segment if self.members > 1 else 1
        return replace(self, count=end - begin, start=self.word_index(begin), members=members)

    def word_index(self, unit: int) -> int:
        """The index of the word that starts with this unit, for the digest. Members of a stack begin at 0."""
        if self.members > 1:
            return unit % self.segment * self.dtype.unit // self.word
        return self.start + unit * self.dtype.unit // self.word

    def blocks_of_rows(self, first: int, last: int) -> range:
        """The blocks that hold rows from `first` to before `last` of this layout. All blocks if it has no rows."""
        if first >= last or not self.count:
            return range(0)
        if not self.row:
            return range(self.blocks)
        return range(first * self.row // self.block, -(-last * self.row // self.block))


def _units(dtype: Dtype, shape: tuple[int, ...]) -> int:
    """The number of units in a shape. 0 if a packed dtype would end inside a byte."""
    nbytes = dtype.nbytes(shape)
    return 0 if nbytes is None else nbytes // dtype.unit


def _line(dtype: Dtype, shape: tuple[int, ...], row: int) -> int:
    """The last dimension, if it is long enough and consists of whole words. Otherwise 0."""
    line = _units(dtype, shape[-1:]) if len(shape) > 1 else 0
    good = line >= _LINE_LEAST and line * dtype.unit % 8 == 0 and 2 * line <= BLOCK and row % line == 0
    return line if good and 0 not in shape else 0


def _block(count: int, line: int) -> int:
    """The block size: whole lines, or a multiple of 8 units. All blocks but the last have it."""
    grain = line or 8
    grains = -(-count // grain)
    most = BLOCK // grain
    return -(-grains // max(1, -(-grains // most))) * grain if count else BLOCK
