"""Updates a copy of the weights in place and keeps the old values, so that the update can be undone.

One scan makes the copy equal to the latest weights, which may then be overwritten. The delta is encoded
afterwards, from the copy and its old values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
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
    copy: Weights,
    latest: Weights,
    *,
    threads: int | None = None,
    done: BlockDone | None = None,
    progress: Callable[[int], None] | None = None,
) -> CopyAdvance:
    """Makes a copy equal to the latest weights, completely or not at all. Both must have the same schema and rows.

    Blocks are read in the order of `latest`. `done` is called for each block that may be overwritten, possibly also
    before a failure. The result keeps the old values, of changed units only.
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
        if progress:
            progress(block.nbytes)

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
        # After a success too: an interrupt may come at the last moment.
        to_the_end(lambda stop: _undo(blocks))
        raise


class CopyAdvance:
    """A copy that has been updated in `changed` units. The copy must not change while this is used."""

    changed: int

    def __init__(self, copy: Weights, blocks: list[_Block]) -> None:
        self.changed = sum(block.changed for block in blocks)
        self._copy = copy
        self._blocks = blocks
        self._undone = False

    @property
    def nbytes(self) -> int:
        """The size of the blocks that changed."""
        return sum(block.nbytes for block in self._blocks)

    def undo(self) -> None:
        """Restores the old values. May be called twice."""
        self._undone = True
        to_the_end(lambda stop: _undo(self._blocks))

    def diff(
        self,
        before: State,
        *,
        threads: int | None = None,
        spool: IO[bytes] | None = None,
        part: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Delta:
        """The delta from the old values, with the state `before`, to the new ones: the same bytes as `delta.diff`.

        Every block is decoded again and compared, so a returned delta is proven to lead to these weights. With `part`,
        the delta names no state.
        """
        if self._undone:
            raise ValueError("undo() was called, so nothing is left to encode")
        scratch = _Scratch(max((block.nbytes for block in self._blocks), default=0))

        def encode(block: _Block) -> EncodedBlock:
            made = _encode(block, scratch)
            if progress:
                progress(block.nbytes)
            return made

        encoded = in_order(encode, self._blocks, threads)
        changed = ((block.name, block.index, made) for block, made in zip(self._blocks, encoded, strict=True))
        return diff_of_blocks(self._copy, changed, before=before, spool=spool, part=part)


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """One block of the copy. After `advance`, its patch holds the old values."""

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
        """Counts the changed units. Separate from `advance`, because it takes time if all old values were kept."""
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
    """A reusable buffer per thread, for one block: touching fresh pages costs more than the work itself."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @cached_property
    def _memory(self) -> npt.NDArray[np.uint8]:
        return aligned_memory(self._nbytes)

    def like(self, units: Bits) -> Bits:
        return self._memory[: units.nbytes].view(units.dtype)


def _encode(block: _Block, scratch: _Scratch) -> EncodedBlock:
    """Encodes the change of a block, and proves that it decodes to the new values."""
    assert block.patch is not None
    new, alone = block.units, block.layout.alone(block.index)
    old = scratch.like(new)
    _put_old(old, new, block.patch, alone)
    encoded = codec.encode(old, new, alone, 0)
    added = 0, 0
    if encoded.data:  # empty if `latest` changed during the scan and then changed back
        try:
            _, added = codec.apply(encoded.data, old, alone, 0, fresh=False)
        except ValueError as problem:
            _fail(block, str(problem))
    if added != encoded.digest or codec.replace(old, new, alone, 0).values:
        _fail(block, "it decodes to other weights")
    return encoded


def _put_old(room: Bits, new: Bits, patch: Patch, alone: Layout) -> None:
    """Writes the old values of a block into `room`. The patch stays unchanged, for `undo`."""
    if patch.positions is None:
        np.copyto(room, np.frombuffer(patch.values, new.dtype))
    else:
        np.copyto(room, new)
        codec.swap(room, Patch(patch.positions, bytearray(patch.values)), alone, 0)


def _fail(block: _Block, why: str) -> NoReturn:
    raise CorruptDelta(
        f"tensor {block.name!r}: block {block.index} was encoded wrongly: {why}",
        hint="publish again; if it fails again, this is a bug or the machine's memory is faulty",
    )
