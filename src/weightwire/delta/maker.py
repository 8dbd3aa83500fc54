"""Makes deltas and anchors.

Cuts tensors into blocks, encodes them in threads, and packs the result with the state digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import numpy as np

from weightwire import codec
from weightwire.codec import BlockChanges, Digest, EncodedBlock, Layout, encode_coo
from weightwire.delta.file import ANCHOR, DELTA, BlockData, Delta, Entry, Packed, Spool, pack
from weightwire.delta.state import State, TensorState, add_digests
from weightwire.errors import CheckpointError
from weightwire.system import Progress, in_order
from weightwire.weights import Tensor, Weights, read_weights

__all__ = ["BlockDone", "ChangedBlock", "anchor", "diff", "diff_of_blocks"]

BlockDone = Callable[[str, int], None]
"""Called with the name of a tensor and a block index when the block will not be read again. Runs in any thread."""

ChangedBlock = tuple[str, int, EncodedBlock]
"""The name of a tensor, the index of a block, and the encoded block."""


def diff(
    old: Any,
    new: Any,
    *,
    before: State | None = None,
    coo: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    spool: IO[bytes] | None = None,
    done: BlockDone | None = None,
) -> Delta:
    """The smallest exact delta that turns `old` into `new`, or positions and values if `coo`.

    - `old`, `new`: a safetensors file, a checkpoint directory, or a mapping of names to NumPy arrays, torch tensors,
      `Tensor`s or `(dtype name, shape, buffer)`.
    - `before`: the state of `old` if it is known (from `digest` or `Delta.advance`). Otherwise `old` is read twice.
    - `spool`: a temporary file that holds the encoded blocks instead of memory. Keep it open while the delta is used.
    - `done`: called for each block of `new` that will not be read again, roughly in the order of `new`.
    """
    return _make(read_weights(old), read_weights(new), DELTA, before, coo, _MakeOptions(threads, progress, spool, done))


def anchor(
    weights: Any,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    spool: IO[bytes] | None = None,
    done: BlockDone | None = None,
    part: bool = False,
) -> Delta:
    """An anchor: all weights, in a file that needs no base. `spool`, `done`: as in `diff`.

    With `part`, `weights` holds only some of a model's weights, and the file names no state.
    """
    return _make({}, read_weights(weights), ANCHOR, None, False, _MakeOptions(threads, progress, spool, done, part))


def diff_of_blocks(
    weights: Weights,
    changed: Iterable[ChangedBlock],
    *,
    before: State,
    spool: IO[bytes] | None = None,
    part: bool = False,
) -> Delta:
    """The delta to `weights`, given the encoded blocks that changed. Names, dtypes and shapes must not differ.

    Gives the same bytes as `diff`, without the old weights. `part`: as in `anchor`.
    """
    _check_known(before, weights)
    makings = {name: _Making(name, tensor, tensor) for name, tensor in weights.items()}
    keep = _keep(spool)
    for name, index, block in changed:
        makings[name].gather(index, _Done(added=block.digest, data=block.data, changed=block.changed), keep)
    return _pack(makings, DELTA, before, keep, part)


@dataclass(frozen=True)
class _MakeOptions:
    """Options for making a delta. Only `part` affects the result."""

    threads: int | None
    progress: Progress | None
    spool: IO[bytes] | None
    done: BlockDone | None
    part: bool = False


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Done:
    """The result for one block."""

    base: Digest = (0, 0)  # digest of the old block, if it was not known
    added: Digest = (0, 0)  # change of the digest; for a fresh tensor the digest itself
    data: bytes = b""
    changed: int = 0
    found: BlockChanges | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class _Job:
    name: str
    run: Callable[[], _Done]
    new_block: int | None = None  # the block of the new tensor that it reads, if any


def _digest_old(old: Tensor, layout: Layout, index: int) -> _Done:
    return _Done(base=codec.digest(old.bits, layout, index))


def _encode_fresh(new: Tensor, layout: Layout, index: int) -> _Done:
    block = codec.encode(None, new.bits, layout, index)
    begin, end = layout.span(index)
    added = codec.digest(new.bits, layout, index)
    return _Done(added=added, data=block.data, changed=block.changed, nbytes=(end - begin) * layout.dtype.unit)


def _encode_change(old: Tensor, new: Tensor, layout: Layout, index: int, known: bool, coo: bool) -> _Done:
    base = (0, 0) if known else codec.digest(old.bits, layout, index)
    block = codec.encode(old.bits, new.bits, layout, index)
    begin, end = layout.span(index)
    nbytes = (end - begin) * layout.dtype.unit
    if not coo or not block.changed:
        return _Done(base, block.digest, block.data, block.changed, nbytes=nbytes)
    at = np.flatnonzero(old.bits[begin:end] != new.bits[begin:end])
    return _Done(base, block.digest, b"", block.changed, (index, at, new.bits[begin:end][at]), nbytes)


# --- tensors -----------------------------------------------------------------------------------------------------


@dataclass
class _Making:
    """A tensor before and after (either may be missing), and the results for its blocks so far."""

    name: str
    old: Tensor | None
    new: Tensor | None
    base: Digest = (0, 0)
    added: Digest = (0, 0)
    changed: int = 0
    parts: dict[int, BlockData] = field(default_factory=dict)  # changed blocks
    found: list[BlockChanges] = field(default_factory=list)

    @property
    def fresh(self) -> bool:
        """True if the new tensor is encoded without the old one."""
        old, new = self.old, self.new
        return old is None or new is None or _kind(old) != _kind(new)

    def jobs(self, known: bool, coo: bool) -> Iterator[_Job]:
        old, new = self.old, self.new
        if old is not None and new is not None and not self.fresh:
            yield from self._each_new(_layout(new), partial(_encode_change, old, new, known=known, coo=coo))
            return
        if old is not None and not known:
            layout = _layout(old)
            for index in range(layout.blocks):
                yield _Job(self.name, partial(_digest_old, old, layout=layout, index=index))
        if new is not None:
            yield from self._each_new(_layout(new), partial(_encode_fresh, new))

    def _each_new(self, layout: Layout, work: Callable[..., _Done]) -> Iterator[_Job]:
        for index in range(layout.blocks):
            yield _Job(self.name, partial(work, layout=layout, index=index), index)

    def gather(self, block: int | None, done: _Done, keep: Callable[[bytes], BlockData]) -> None:
        self.base = add_digests(self.base, done.base)
        self.added = add_digests(self.added, done.added)
        self.changed += done.changed
        if block is not None and done.data:
            self.parts[block] = keep(done.data)
        if done.found:
            self.found.append(done.found)

    def packed(self, known: State, keep: Callable[[bytes], BlockData]) -> Packed | None:
        """The entry for the file, or None if the tensor was removed or did not change."""
        new = self.new
        if new is None or not (self.fresh or self.changed):
            return None
        layout = _layout(new)
        parts: Sequence[BlockData] = [self.parts.get(index, b"") for index in range(layout.blocks)]
        if self.found:
            parts = [keep(encode_coo(self.found, layout))]
        entry = Entry(
            name=self.name,
            dtype=new.dtype,
            shape=new.shape,
            rows=new.rows,
            coo=bool(self.found),
            fresh=self.fresh,
            changed=self.changed,
            blocks=tuple(map(len, parts)) if layout.blocks else (),
            digest=self.added if self.fresh else add_digests(known.tensors[self.name].digest, self.added),
        )
        return Packed(entry, parts)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.rows


def _layout(tensor: Tensor) -> Layout:
    return Layout.of(tensor.dtype, tensor.shape, tensor.rows)


# --- files -------------------------------------------------------------------------------------------------------


def _make(old: Weights, new: Weights, kind: str, before: State | None, coo: bool, options: _MakeOptions) -> Delta:
    if before is not None:
        _check_known(before, old)
    # In the order of `new`. Tensors that are only in `old` come last.
    makings = {name: _Making(name, old.get(name), new.get(name)) for name in dict.fromkeys((*new, *old))}
    jobs = [job for making in makings.values() for job in making.jobs(before is not None, coo)]
    keep = _keep(options.spool)

    def work(job: _Job) -> _Done:
        result = job.run()
        if options.done and job.new_block is not None:
            options.done(job.name, job.new_block)
        return result

    for job, done in zip(jobs, in_order(work, jobs, options.threads), strict=True):
        makings[job.name].gather(job.new_block, done, keep)
        if options.progress:
            options.progress(done.nbytes)
    return _pack(makings, kind, before, keep, options.part)


def _keep(spool: IO[bytes] | None) -> Callable[[bytes], BlockData]:
    """Stores encoded blocks in the spool, or in memory."""
    return Spool(spool).keep if spool else lambda data: data


def _pack(
    makings: Mapping[str, _Making],
    kind: str,
    before: State | None,
    keep: Callable[[bytes], BlockData],
    part: bool,
) -> Delta:
    known = before or State(
        {name: TensorState(one.old.dtype, one.old.shape, one.base) for name, one in makings.items() if one.old}
    )
    packed = [one for making in makings.values() if (one := making.packed(known, keep))]
    removed = [name for name, making in makings.items() if making.new is None]
    after = known.replace({one.entry.name: one.entry.state for one in packed}, removed)
    both = [tensor for one in makings.values() for tensor in (one.old, one.new)]
    partial_file = part or any(tensor and tensor.rows for tensor in both)
    return pack(
        packed,
        kind=kind,
        before="" if partial_file or kind == ANCHOR else known.hex,
        after="" if partial_file else after.hex,
        removed=removed,
    )


def _check_known(before: State, old: Weights) -> None:
    have = {name: (tensor.dtype, tensor.shape) for name, tensor in old.items()}
    know = {name: (tensor.dtype, tensor.shape) for name, tensor in before.tensors.items()}
    if have != know:
        name = min(name for name in {**have, **know} if have.get(name) != know.get(name))
        raise CheckpointError(
            f"tensor {name!r}: the state `before` does not match the old weights",
            hint="pass before=digest(old), or omit it",
        )
