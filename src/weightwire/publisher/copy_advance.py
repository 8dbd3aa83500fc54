"""Moves a copy of the weights forward, and remembers the way back.

One scan makes the copy equal to the latest weights, which are then free to be overwritten; the delta is made after
that, from the copy and what it held before. Knows weights, the codec and threads; no file, and no bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import IO, NoReturn

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import EncodedBlock, Layout, Patch
from weightwire.delta import BlockDone, Delta, State, diff_of_blocks
from weightwire.errors import CorruptDelta
from weightwire.publisher.aligned_memory import aligned_memory
from weightwire.system import Stopped, in_order, to_the_end
from weightwire.weights import Bits, Tensor, Weights

__all__ = ["CopyAdvance", "advance_copy"]


def advance_copy(
    copy: Weights, latest: Weights, *, threads: int | None = None, done: BlockDone | None = None
) -> CopyAdvance:
    """Makes a copy equal to the latest weights, of the same names, dtypes, shapes and rows; all of it or nothing.

    Blocks are read in the order of `latest`; `done` hears of each as soon as it is no longer needed, and of some before
    a failure too. What the copy held before is kept for as long as the result is: where the copy changed, and no more.
    """
    blocks = [
        _Block(name, copy[name].bits, layout, index)
        for name in latest
        for layout in [Layout.of(copy[name].dtype, copy[name].shape, copy[name].rows)]
        for index in range(layout.blocks)
    ]

    scratch = _Scratch(max((block.nbytes for block in blocks), default=0))

    def advance(block: _Block, stop: threading.Event) -> None:
        if stop.is_set():
            raise Stopped
        block.advance(latest[block.name], scratch)
        if done:
            done(block.name, block.index)
        block.count()

    def work(stop: threading.Event) -> None:
        try:
            for _ in in_order(partial(advance, stop=stop), blocks, threads):
                pass
            if stop.is_set():
                raise Stopped
        except BaseException:
            _undo(blocks)
            raise

    try:
        to_the_end(work)
        return CopyAdvance(copy, [block for block in blocks if block.changed])
    except BaseException:
        # There is still something to undo where all went well, and an interrupt came at the last moment.
        to_the_end(lambda stop: _undo(blocks))
        raise


class CopyAdvance:
    """A copy that has been moved forward: `changed` of its units. The copy must stay as it is while this is used."""

    changed: int

    def __init__(self, copy: Weights, blocks: list[_Block]) -> None:
        self.changed = sum(block.changed for block in blocks)
        self._copy = copy
        self._blocks = blocks
        self._undone = False

    def undo(self) -> None:
        """Puts everything back as it was; twice is harmless."""
        self._undone = True
        to_the_end(lambda stop: _undo(self._blocks))

    def diff(
        self, before: State, *, threads: int | None = None, spool: IO[bytes] | None = None, part: bool = False
    ) -> Delta:
        """The delta from what the copy was, with the state `before`, to what it is: byte for byte that of `delta.diff`.

        Every block is decoded again, and the result compared: a delta that is returned leads to these weights. It
        does not name their state if they are only a `part` of a model's.
        """
        if self._undone:
            raise ValueError("the copy was put back: there is nothing to make a delta of")
        scratch = _Scratch(max((block.nbytes for block in self._blocks), default=0))
        encoded = in_order(lambda block: _encode(block, scratch), self._blocks, threads)
        changed = ((block.name, block.index, made) for block, made in zip(self._blocks, encoded, strict=True))
        return diff_of_blocks(self._copy, changed, before=before, spool=spool, part=part)


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """One block of the copy; once it has been advanced, its patch holds what was there before."""

    name: str
    bits: Bits
    layout: Layout
    index: int
    patch: Patch | None = None
    changed: int = 0

    @property
    def units(self) -> Bits:
        begin, end = self.layout.span(self.index)
        return self.bits[begin:end]

    @property
    def nbytes(self) -> int:
        return self.units.nbytes

    def advance(self, latest: Tensor, scratch: _Scratch) -> None:
        units = self.units
        source = latest.part(*self.layout.span(self.index), partial(scratch.like, units))
        self.patch = codec.replace(units, source, self.layout.alone(self.index), 0)

    def count(self) -> None:
        """How many units changed. Apart from advancing: where all were kept it takes time."""
        assert self.patch is not None
        old = np.frombuffer(self.patch.values, self.bits.dtype)
        self.changed = len(old) if self.patch.positions is not None else int(np.count_nonzero(old != self.units))

    def undo(self) -> None:
        if self.patch is not None:
            codec.swap(self.bits, self.patch, self.layout, self.index)
            self.patch = None


def _undo(blocks: Iterable[_Block]) -> None:
    for block in blocks:
        block.undo()


class _Scratch(threading.local):
    """Room for one block in every thread that needs it, touched once: fresh pages cost more than the work itself."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @cached_property
    def _memory(self) -> npt.NDArray[np.uint8]:
        return aligned_memory(self._nbytes)

    def like(self, units: Bits) -> Bits:
        return self._memory[: units.nbytes].view(units.dtype)


def _encode(block: _Block, scratch: _Scratch) -> EncodedBlock:
    """Encodes a block from what it was to what it is, and proves that it decodes to just that."""
    assert block.patch is not None
    new, alone = block.units, block.layout.alone(block.index)
    old = scratch.like(new)
    _put_old(old, new, block.patch, alone)
    encoded = codec.encode(old, new, alone, 0)
    added = 0, 0
    if encoded.data:  # none where `latest` changed under our hands, and back
        try:
            _, added = codec.apply(encoded.data, old, alone, 0, fresh=False)
        except ValueError as problem:
            _fail(block, str(problem))
    if added != encoded.digest or codec.replace(old, new, alone, 0).values:
        _fail(block, "it decodes to other weights")
    return encoded


def _put_old(room: Bits, new: Bits, patch: Patch, alone: Layout) -> None:
    """The block as it was. The patch stays as it is: it is the way back."""
    if patch.positions is None:
        np.copyto(room, np.frombuffer(patch.values, new.dtype))
    else:
        np.copyto(room, new)
        codec.swap(room, Patch(patch.positions, bytearray(patch.values)), alone, 0)


def _fail(block: _Block, why: str) -> NoReturn:
    raise CorruptDelta(
        f"tensor {block.name!r}: block {block.index}: what was just encoded is wrong: {why}",
        hint="try again; if it happens twice, it is a bug, or this machine's memory is faulty",
    )
