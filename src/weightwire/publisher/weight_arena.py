"""Weights in one allocation, in batches: a block of a large tensor, or many small tensors of one dtype.

Small tensors lie next to each other, sorted by name. So they are copied, compared and encoded in a few large steps,
however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec import BLOCK, Layout
from weightwire.publisher.aligned_memory import CACHE_LINE, aligned_memory
from weightwire.system import in_order
from weightwire.weights import Bits, Dtype, Rows, Schema, Tensor, Weights

__all__ = ["Batch", "Piece", "WeightArena"]

_SMALL = BLOCK // 4  # units; larger tensors are not put together
_PAGES = 4 << 20  # bytes touched at once


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, and its place in a batch: units `begin` to `end`. `layout` is that of the block alone."""

    name: str
    index: int
    layout: Layout
    begin: int
    end: int
    first: int  # unit of the tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Contiguous units of one dtype. They begin at byte `at` of the arena."""

    index: int
    dtype: Dtype
    at: int
    count: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.unit

    def read(self, weights: Weights, out: Bits) -> None:
        """Copies these pieces of any weights with the same schema and rows."""
        if len(self.pieces) == 1:
            (piece,) = self.pieces
            weights[piece.name].copy_to(piece.first, piece.first + self.count, out)
            return
        tensors = [weights[piece.name] for piece in self.pieces]
        if all(type(tensor) is Tensor for tensor in tensors):
            np.concatenate([tensor.bits for tensor in tensors], out=out)
            return
        for piece, tensor in zip(self.pieces, tensors, strict=True):
            tensor.copy_to(0, piece.end - piece.begin, out[piece.begin : piece.end])


class WeightArena(Mapping[str, Tensor]):
    """Tensors in the order of the schema, zero at first. Those of a shard have only its `rows`."""

    def __init__(self, schema: Schema, rows: Mapping[str, Rows] | None = None, threads: int | None = None) -> None:
        self._threads = threads
        rows = rows or {}
        layouts = {name: Layout.of(*kind, rows.get(name)) for name, kind in schema.items()}
        plan = _Plan(layouts)
        self.batches = tuple(plan.batches)
        self._memory = aligned_memory(plan.size)
        _touch(self._memory, threads)
        self._tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in schema.items():
            bits = np.frombuffer(self._memory, f"<u{dtype.unit}", layouts[name].count, plan.places[name])
            self._tensors[name] = Tensor(dtype, shape, bits, rows.get(name))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    # As fast as those of a dict.

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def units(self, batch: Batch) -> Bits:
        return np.frombuffer(self._memory, f"<u{batch.dtype.unit}", batch.count, batch.at)

    def copy_from(self, weights: Weights, progress: Callable[[int], None] | None = None) -> None:
        """Copies weights with the same schema and rows."""

        def work(batch: Batch) -> None:
            batch.read(weights, self.units(batch))
            if progress:
                progress(batch.nbytes)

        for _ in in_order(work, self.batches, self._threads):
            pass


class _Plan:
    """The batches, the place of every tensor in bytes, and the size of all: large tensors, then small ones by dtype."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self.batches: list[Batch] = []
        self.places: dict[str, int] = {}
        self.size = 0
        small: dict[str, list[str]] = {}
        for name in sorted(layouts, key=str.encode):
            layout = layouts[name]
            if layout.count > _SMALL:
                self._add_large(name, layout)
            else:
                small.setdefault(layout.dtype.name, []).append(name)
        for dtype in sorted(small):
            self._add_small({name: layouts[name] for name in small[dtype]})

    def _add_large(self, name: str, layout: Layout) -> None:
        start, unit = self.size, layout.dtype.unit
        for index in range(layout.blocks):
            begin, end = layout.span(index)
            self._add([Piece(name, index, layout.alone(index), 0, end - begin, begin)], start + begin * unit)
        self.places[name] = start
        self._end(start + layout.count * unit)

    def _add_small(self, layouts: Mapping[str, Layout]) -> None:
        pieces: list[Piece] = []
        start, count, unit = self.size, 0, 1
        for name, layout in layouts.items():
            unit = layout.dtype.unit
            if count + layout.count > BLOCK:
                self._add(pieces, start)
                self._end(start + count * unit)
                pieces, start, count = [], self.size, 0
            self.places[name] = start + count * unit
            if layout.count:
                pieces.append(Piece(name, 0, layout, count, count + layout.count, 0))
            count += layout.count
        self._add(pieces, start)
        self._end(start + count * unit)

    def _add(self, pieces: list[Piece], at: int) -> None:
        if pieces:
            dtype, count = pieces[0].layout.dtype, pieces[-1].end
            self.batches.append(Batch(len(self.batches), dtype, at, count, tuple(pieces)))

    def _end(self, end: int) -> None:
        """What follows begins in a new cache line."""
        self.size = end + -end % CACHE_LINE


def _touch(memory: npt.NDArray[np.uint8], threads: int | None) -> None:
    """Touches every page now: the first write to a page takes longer than a copy, and a trainer would wait for it."""
    for _ in in_order(lambda at: memory[at : at + _PAGES].fill(0), range(0, len(memory), _PAGES), threads):
        pass
