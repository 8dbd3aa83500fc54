"""How a tensor, or a range of its rows, is cut into blocks and digested. Pure: shapes in, numbers out.

docs/FORMAT.md, "Layout". A block holds at most 2^22 units, so positions inside it are small whatever the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightwire.weights import Dtype

__all__ = ["BLOCK", "Layout"]

BLOCK = 1 << 22
_LINE_LEAST = 64


@dataclass(frozen=True)
class Layout:
    """`count` units in blocks of `block` (the last may be shorter), made of lines of `line` units or, if 0, none.

    The digest is over words of `word` bytes, the first of which has index `start`.
    """

    dtype: Dtype
    count: int
    block: int
    line: int
    row: int
    word: int
    start: int

    @staticmethod
    def of(dtype: Dtype, shape: tuple[int, ...], rows: tuple[int, int] | None = None) -> Layout:
        """The layout of a whole tensor, or of its rows from `rows[0]` to before `rows[1]`."""
        unit = dtype.unit
        row = _units(dtype, shape[1:])
        word = 8 if row * unit % 8 == 0 and row else unit
        first, last = rows if rows else (0, shape[0] if shape else 1)
        count = row * (last - first) if row else _units(dtype, shape)
        line = _line(dtype, shape, row)
        return Layout(dtype, count, _block(count, line), line, row, word, first * row * unit // word)

    @property
    def blocks(self) -> int:
        return -(-self.count // self.block) if self.count else 0

    def span(self, index: int) -> tuple[int, int]:
        """The units of a block."""
        return index * self.block, min(self.count, (index + 1) * self.block)

    def alone(self, index: int) -> Layout:
        """The layout of one block, for who holds no more than that: its block 0 is encoded and digested the same."""
        begin, end = self.span(index)
        return replace(self, count=end - begin, start=self.word_index(begin))

    def word_index(self, unit: int) -> int:
        """The digest's index of the word that starts with this unit."""
        return self.start + unit * self.dtype.unit // self.word

    def blocks_of_rows(self, first: int, last: int) -> range:
        """The blocks that hold rows from `first` to before `last`, counted within this layout; all if it has none."""
        if first >= last or not self.count:
            return range(0)
        if not self.row:
            return range(self.blocks)
        return range(first * self.row // self.block, -(-last * self.row // self.block))


def _units(dtype: Dtype, shape: tuple[int, ...]) -> int:
    """Units in a shape; 0 where a packed dtype's would end inside a byte (or there are none)."""
    nbytes = dtype.nbytes(shape)
    return 0 if nbytes is None else nbytes // dtype.unit


def _line(dtype: Dtype, shape: tuple[int, ...], row: int) -> int:
    """The last dimension, where lines are long enough to be worth telling apart and whole words."""
    line = _units(dtype, shape[-1:]) if len(shape) > 1 else 0
    good = line >= _LINE_LEAST and line * dtype.unit % 8 == 0 and 2 * line <= BLOCK and row % line == 0
    return line if good and 0 not in shape else 0


def _block(count: int, line: int) -> int:
    """Blocks of equal size: of whole lines, or of a multiple of 8 units."""
    grain = line or 8
    grains = -(-count // grain)
    most = BLOCK // grain
    return -(-grains // max(1, -(-grains // most))) * grain if count else BLOCK
