"""Updates a copy of the weights in place, by the delta that followers will apply, and keeps the old values for an undo.

One pass encodes the difference to the latest weights, decodes it into the copy, and compares: a delta is proven while
its block is in the cache. A batch of the latest weights may be overwritten once it was compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import IO, NoReturn

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import EncodedBlock, Layout, Patch
from weightwire.delta import Delta, State, diff_of_blocks
from weightwire.errors import CorruptDelta
from weightwire.publisher.aligned_memory import passing_memory
from weightwire.publisher.weight_arena import Batch, Piece, WeightArena
from weightwire.system import Stopped, in_order, to_the_end
from weightwire.weights import Bits, Weights

__all__ = ["CopyAdvance", "advance_copy"]

BatchDone = Callable[[int], None]
"""Called with the index of a batch that will not be read again. Runs in any thread."""


def advance_copy(
    copy: WeightArena,
    latest: Weights,
    *,
    threads: int | None = None,
    done: BatchDone | None = None,
    progress: Callable[[int], None] | None = None,
) -> CopyAdvance:
    """Makes a copy equal to the latest weights, completely or not at all. Both must have the same schema and rows.

    `done` is called for each batch of the copy whose latest weights may be overwritten, possibly also before a failure.
    The result keeps the encoded blocks, and the old values of changed units.
    """
    scratch = _Scratch(max((batch.nbytes for batch in copy.batches), default=0))
    steps = [_BatchAdvance(batch, copy.units(batch)) for batch in copy.batches]

    def advance(step: _BatchAdvance, stop: threading.Event) -> None:
        if stop.is_set():
            raise Stopped
        step.advance(_units(latest, step.batch, scratch))
        if done:
            done(step.batch.index)
        if progress:
            progress(step.batch.nbytes)

    def work(stop: threading.Event) -> None:
        try:
            for _ in in_order(partial(advance, stop=stop), steps, threads):
                pass
            if stop.is_set():
                raise Stopped
        except BaseException:
            _undo(steps)
            raise

    try:
        to_the_end(work)
        return CopyAdvance(copy, steps)
    except BaseException:
        # After a success too: an interrupt may come at the last moment.
        to_the_end(lambda stop: _undo(steps))
        raise


class CopyAdvance:
    """A copy that has been updated in `changed` units. The copy must not change while this is used."""

    changed: int

    def __init__(self, copy: WeightArena, steps: list[_BatchAdvance]) -> None:
        self.changed = sum(int(block.changed.sum()) for step in steps for _, block in step.encoded)
        self._copy = copy
        self._steps = steps
        self._undone = False

    def undo(self) -> None:
        """Restores the old values. May be called twice."""
        self._undone = True
        to_the_end(lambda stop: _undo(self._steps))

    def diff(self, before: State, *, spool: IO[bytes] | None = None, part: bool = False) -> Delta:
        """The delta from the old values, with the state `before`, to the new ones: the same bytes as `delta.diff`.

        It was applied to the copy, so it is proven to lead to these weights. With `part`, the delta names no state.
        """
        if self._undone:
            raise ValueError("undo() was called, so nothing is left to encode")
        changed = ((piece.stack.names[0], piece.index, block) for step in self._steps for piece, block in step.encoded)
        return diff_of_blocks(self._copy, changed, before=before, spool=spool, part=part)


# --- batches -----------------------------------------------------------------------------------------------------


@dataclass
class _BatchAdvance:
    """One batch of the copy. After `advance` it has the encoded blocks, and what was overwritten."""

    batch: Batch
    units: Bits
    encoded: list[tuple[Piece, EncodedBlock]] = field(default_factory=list)
    replaced: list[tuple[int, int, Patch]] = field(default_factory=list)  # first unit, last + 1, old values

    def advance(self, latest: Bits) -> None:
        for piece in self.batch.pieces:
            old, new = self.units[piece.begin : piece.end], latest[piece.begin : piece.end]
            block = codec.encode(old, new, piece.layout, 0)
            if block.data:
                self._apply(piece, block, old)
                self.encoded.append((piece, block))
        # Independent of the encoder: it may have missed a change.
        rest = codec.replace(self.units, latest, Layout.of(self.batch.dtype, (self.batch.count,)), 0)
        if rest.values:
            self.replaced.append((0, self.batch.count, rest))
            self._fail(rest, latest)

    def _apply(self, piece: Piece, block: EncodedBlock, old: Bits) -> None:
        try:
            patch, added = codec.apply(block.data, old, piece.layout, 0, fresh=False)
        except ValueError as problem:
            _fail(piece, str(problem))
        self.replaced.append((piece.begin, piece.end, patch))
        if not np.array_equal(added, block.digests):
            _fail(piece, _OTHER)

    def _fail(self, rest: Patch, latest: Bits) -> NoReturn:
        """Names the tensor with the first unit that is wrong."""
        if rest.positions is None:
            at = int(np.flatnonzero(np.frombuffer(rest.values, latest.dtype) != latest)[0])
        else:
            at = int.from_bytes(rest.positions[:4], "little")
        piece = next(piece for piece in self.batch.pieces if at < piece.end)
        _fail(piece, _OTHER, (at - piece.begin) // piece.layout.segment)

    def undo(self) -> None:
        unit = self.batch.dtype.unit
        while self.replaced:
            begin, end, patch = self.replaced[-1]
            codec.swap_units(self.units[begin:end], patch, unit, 0)
            self.replaced.pop()


def _undo(steps: Iterable[_BatchAdvance]) -> None:
    for step in steps:
        step.undo()


def _units(latest: Weights, batch: Batch, scratch: _Scratch) -> Bits:
    """The latest units of a batch. Copied if the trainer might still change them: the encoder reads them twice."""
    if isinstance(latest, WeightArena):
        return latest.units(batch)
    units = scratch.units(batch)
    batch.read(latest, units)
    return units


class _Scratch(threading.local):
    """A reusable buffer per thread, for one batch: touching fresh pages costs more than the work itself."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    @cached_property
    def _memory(self) -> npt.NDArray[np.uint8]:
        return passing_memory(self._nbytes)

    def units(self, batch: Batch) -> Bits:
        units: Bits = self._memory[: batch.nbytes].view(f"<u{batch.dtype.unit}")
        return units


_OTHER = "it decodes to other weights"


def _fail(piece: Piece, why: str, member: int = 0) -> NoReturn:
    raise CorruptDelta(
        f"tensor {piece.stack.members(piece.index)[member]!r}: block {piece.index} was encoded wrongly: {why}",
        hint="publish again; if it fails again, this is a bug or the machine's memory is faulty",
    )
