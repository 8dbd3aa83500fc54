"""Weights in one allocation, in batches: a block of a stack, or many small stacks of one dtype.

The members of a stack lie next to each other, and so do small stacks. So tensors are copied, compared and encoded in a
few large steps, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.codec import BLOCK, Layout
from weightwire.delta import TensorKind, TensorStack, stacks_of
from weightwire.publisher.aligned_memory import CACHE_LINE, aligned_memory
from weightwire.system import in_order
from weightwire.weights import Bits, Dtype, HeldWeights, Rows, Schema, Tensor, Weights

__all__ = ["Batch", "Piece", "WeightArena"]

_SMALL = BLOCK // 4  # units; larger tensors are not put together
_PAGES = 4 << 20  # bytes touched at once


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a stack, and its place in a batch: units `begin` to `end`."""

    stack: TensorStack
    index: int
    begin: int
    end: int

    @property
    def layout(self) -> Layout:
        """The layout of the block alone."""
        return self.stack.layout.alone(self.index)

    def read(self, weights: Weights, out: Bits) -> None:
        """Copies the units of the block."""
        tensors = [weights[name] for name in self.stack.members(self.index)]
        if self.stack.is_single:
            tensors[0].copy_to(*self.stack.layout.span(self.index), out)
        elif {*map(type, tensors)} == {Tensor}:
            np.concatenate([tensor.bits for tensor in tensors], out=out)
        else:
            for tensor, room in zip(tensors, out.reshape(len(tensors), -1), strict=True):
                tensor.copy_to(0, len(room), room)


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
        for piece in self.pieces:
            piece.read(weights, out[piece.begin : piece.end])


class WeightArena(HeldWeights):
    """Tensors in the order of the schema, zero at first. Those of a shard have only its `rows`."""

    def __init__(self, schema: Schema, rows: Mapping[str, Rows] | None = None, threads: int | None = None) -> None:
        self._threads = threads
        rows = rows or {}
        plan = _ArenaPlan({name: (*kind, rows.get(name)) for name, kind in schema.items()})
        self.stacks = plan.stacks
        self.batches = tuple(plan.batches)
        self.nbytes = sum(batch.nbytes for batch in self.batches)
        self._blocks = {
            (piece.stack.names[0], piece.index): (batch, piece) for batch in self.batches for piece in batch.pieces
        }
        self._memory = aligned_memory(plan.size)
        _touch(self._memory, threads)
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in schema.items():
            count = Layout.of(dtype, shape, rows.get(name)).count
            bits = np.frombuffer(self._memory, f"<u{dtype.unit}", count, plan.places[name])
            tensors[name] = Tensor(dtype, shape, bits, rows.get(name))
        super().__init__(tensors)

    def units(self, batch: Batch) -> Bits:
        return np.frombuffer(self._memory, f"<u{batch.dtype.unit}", batch.count, batch.at)

    def units_of(self, stack: TensorStack, block: int) -> Bits | None:
        found = self._blocks.get((stack.names[0], block))
        if found is None:
            return None
        batch, piece = found
        # Members of other weights than these may lie elsewhere. As many of one kind are the same.
        if piece.stack.kind != stack.kind or len(piece.stack.names) != len(stack.names):
            return None
        return self.units(batch)[piece.begin : piece.end]

    def copy_from(self, weights: Weights, progress: Callable[[int], None] | None = None) -> None:
        """Copies weights with the same schema and rows."""

        def work(batch: Batch) -> None:
            batch.read(weights, self.units(batch))
            if progress:
                progress(batch.nbytes)

        for _ in in_order(work, self.batches, self._threads):
            pass


class _ArenaPlan:
    """The batches, the place of every tensor in bytes, and the size of all: large stacks, then small ones by dtype."""

    def __init__(self, kinds: Mapping[str, TensorKind]) -> None:
        self.batches: list[Batch] = []
        self.places: dict[str, int] = {}
        self.size = 0
        small: dict[str, list[TensorStack]] = {}
        self.stacks = tuple(stacks_of(kinds))
        for stack in self.stacks:
            if stack.layout.count > _SMALL:
                self._add_large(stack)
            else:
                small.setdefault(stack.layout.dtype.name, []).append(stack)
        for dtype in sorted(small):
            self._add_small(small[dtype])

    def _add_large(self, stack: TensorStack) -> None:
        """One batch for each block."""
        start, unit = self.size, stack.layout.dtype.unit
        for index in range(stack.layout.blocks):
            begin, end = stack.layout.span(index)
            self._add([Piece(stack, index, 0, end - begin)], start + begin * unit)
        self._place(stack, start)
        self._end(start + stack.layout.count * unit)

    def _add_small(self, stacks: Sequence[TensorStack]) -> None:
        pieces: list[Piece] = []
        start, count, unit = self.size, 0, 1
        for stack in stacks:
            unit, units = stack.layout.dtype.unit, stack.layout.count
            if count + units > BLOCK:
                self._add(pieces, start)
                self._end(start + count * unit)
                pieces, start, count = [], self.size, 0
            self._place(stack, start + count * unit)
            if units:
                pieces.append(Piece(stack, 0, count, count + units))
            count += units
        self._add(pieces, start)
        self._end(start + count * unit)

    def _place(self, stack: TensorStack, at: int) -> None:
        nbytes = stack.layout.count // len(stack.names) * stack.layout.dtype.unit
        for k, name in enumerate(stack.names):
            self.places[name] = at + k * nbytes

    def _add(self, pieces: list[Piece], at: int) -> None:
        if pieces:
            dtype, count = pieces[0].stack.layout.dtype, pieces[-1].end
            self.batches.append(Batch(len(self.batches), dtype, at, count, tuple(pieces)))

    def _end(self, end: int) -> None:
        """What follows begins in a new cache line."""
        self.size = end + -end % CACHE_LINE


def _touch(memory: npt.NDArray[np.uint8], threads: int | None) -> None:
    """Touches every page now: the first write to a page takes longer than a copy, and a trainer would wait for it."""
    for _ in in_order(lambda at: memory[at : at + _PAGES].fill(0), range(0, len(memory), _PAGES), threads):
        pass
