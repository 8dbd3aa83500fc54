"""Makes deltas and anchors.

Stacks tensors, cuts stacks into blocks, encodes them in threads, and packs the result with the state digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import BlockChanges, Digests, EncodedBlock, encode_coo
from weightwire.delta.encoded_stack import EncodedStack, Entries, Entry
from weightwire.delta.file import ANCHOR, DELTA, Delta, Packed, block_hash, pack
from weightwire.delta.spool import BlockData, Spool
from weightwire.delta.state import State
from weightwire.delta.tensor_stacks import TensorStack, kinds_in, stacks_in, stacks_of
from weightwire.errors import CheckpointError
from weightwire.system import Progress, in_order
from weightwire.weights import Weights, read_weights

__all__ = ["ChangedBlock", "anchor", "diff", "diff_of_blocks"]

ChangedBlock = tuple[str, int, EncodedBlock]
"""The first name of a stack, as `stacks_of` gives it, the index of a block, and the encoded block."""


def diff(
    old: Any,
    new: Any,
    *,
    before: State | None = None,
    coo: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    spool: IO[bytes] | None = None,
) -> Delta:
    """The smallest exact delta that turns `old` into `new`, or positions and values if `coo`.

    - `old`, `new`: a safetensors file, a checkpoint directory, or a mapping of names to NumPy arrays, torch tensors,
      `Tensor`s or `(dtype name, shape, buffer)`.
    - `before`: the state of `old` if it is known (from `digest` or `Delta.advance`). Otherwise `old` is read twice.
    - `spool`: a temporary file that holds the encoded blocks instead of memory. Keep it open while the delta is used.
    """
    return _make(read_weights(old), read_weights(new), DELTA, before, coo, _MakeOptions(threads, progress, spool))


def anchor(
    weights: Any,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    spool: IO[bytes] | None = None,
    part: bool = False,
) -> Delta:
    """An anchor: all weights, in a file that needs no base. `spool`: as in `diff`.

    With `part`, `weights` holds only some of a model's weights, and the file names no state.
    """
    return _make({}, read_weights(weights), ANCHOR, None, False, _MakeOptions(threads, progress, spool, part))


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
    makings = {stack.names[0]: _Making.of(stack, weights, weights) for stack in stacks_in(weights)}
    keep = _keep(spool)
    for name, index, block in changed:
        done = _Done(added=block.digests, data=block.data, changed=block.changed)
        makings[name].gather(index, done.kept(keep))
    return _pack(list(makings.values()), (), DELTA, before, keep, part)


@dataclass(frozen=True)
class _MakeOptions:
    """Options for making a delta. Only `part` affects the result."""

    threads: int | None
    progress: Progress | None
    spool: IO[bytes] | None
    part: bool = False


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Done:
    """The result for one block, per member."""

    base: Digests | None = None  # digests of the old block, if they were not known
    added: Digests | None = None  # changes of the digests; for a fresh stack the digests themselves
    data: BlockData = b""
    changed: npt.NDArray[np.uint32] | None = None
    found: BlockChanges | None = None
    hash: bytes = b""

    def kept(self, keep: Callable[[bytes], BlockData]) -> _Done:
        """The same with its block hashed and stored. Done where it was encoded: few blocks are then in memory."""
        if not isinstance(self.data, bytes) or not self.data:
            return self
        return replace(self, data=keep(self.data), hash=block_hash(self.data))


@dataclass(frozen=True)
class _Job:
    making: _Making
    block: int
    run: Callable[[], _Done]


# --- stacks ------------------------------------------------------------------------------------------------------


@dataclass
class _Making:
    """A stack before and after (either may be missing), and the results for its blocks so far."""

    stack: TensorStack
    old: Weights | None
    new: Weights | None
    base: Digests
    added: Digests
    changed: npt.NDArray[np.int64]
    parts: dict[int, BlockData] = field(default_factory=dict)  # changed blocks
    hashes: dict[int, bytes] = field(default_factory=dict)
    found: list[BlockChanges] = field(default_factory=list)

    @staticmethod
    def of(stack: TensorStack, old: Weights | None, new: Weights | None) -> _Making:
        sums, counts = np.zeros((len(stack.names), 2), np.uint64), np.zeros(len(stack.names), np.int64)
        return _Making(stack, old, new, sums, sums.copy(), counts)

    @property
    def is_fresh(self) -> bool:
        return self.old is None

    def jobs(self, known: bool, coo: bool) -> Iterator[_Job]:
        for block in range(self.stack.layout.blocks):
            if self.new is None:
                if not known:
                    yield _Job(self, block, partial(self._digest_old, block))
            elif self.old is None:
                yield _Job(self, block, partial(self._encode_fresh, block))
            else:
                yield _Job(self, block, partial(self._encode_change, block, known, coo))

    def _digest_old(self, block: int) -> _Done:
        assert self.old is not None
        return _Done(base=codec.digest(self.stack.units(self.old, block), self.stack.layout.alone(block), 0))

    def _encode_fresh(self, block: int) -> _Done:
        assert self.new is not None
        units, alone = self.stack.units(self.new, block), self.stack.layout.alone(block)
        made = codec.encode(None, units, alone, 0)
        return _Done(added=codec.digest(units, alone, 0), data=made.data, changed=made.changed)

    def _encode_change(self, block: int, known: bool, coo: bool) -> _Done:
        assert self.old is not None
        assert self.new is not None
        stack, alone = self.stack, self.stack.layout.alone(block)
        old, new = stack.units(self.old, block), stack.units(self.new, block)
        base = None if known else codec.digest(old, alone, 0)
        made = codec.encode(old, new, alone, 0)
        if not coo or not made.data:
            return _Done(base, made.digests, made.data, made.changed)
        assert not isinstance(old, tuple)  # coo tensors are not stacked
        assert not isinstance(new, tuple)
        at = np.flatnonzero(old != new)
        return _Done(base, made.digests, b"", made.changed, (block, at, new[at]))

    def gather(self, block: int, done: _Done) -> None:
        place = self.stack.place(block)
        if done.base is not None:
            self.base[place] += done.base
        if done.added is not None:
            self.added[place] += done.added
        if done.changed is not None:
            self.changed[place] += done.changed
        if done.data:
            self.parts[block] = done.data
            self.hashes[block] = done.hash
        if done.found:
            self.found.append(done.found)

    @property
    def is_changed(self) -> bool:
        """Whether the file has it."""
        return self.new is not None and (self.is_fresh or bool(self.changed.any()))

    def after(self, known: State) -> Digests:
        """The new digests."""
        return self.added if self.is_fresh else known.digests_of(self.stack.names) + self.added

    def packed(self, after: State, keep: Callable[[bytes], BlockData], has_digests: bool) -> Packed | None:
        """The stack for the file, or None if its tensors were removed or did not change."""
        if not self.is_changed:
            return None
        stack = self.stack
        if self.found:
            data, every = encode_coo(self.found, stack.layout), slice(0, 1)
            entries = self._entries([every], after, has_digests)
            return Packed(EncodedStack(entries, 1, (len(data),), (block_hash(data),)), [keep(data)])
        # Members of unchanged blocks are left out.
        blocks = list(range(stack.layout.blocks)) if stack.is_single else sorted(self.parts)
        places = [slice(0, 1)] if stack.is_single else [stack.place(block) for block in blocks]
        parts = [self.parts.get(block, b"") for block in blocks]
        hashes = tuple(self.hashes.get(block, b"") for block in blocks)
        entries = self._entries(places, after, has_digests)
        return Packed(EncodedStack(entries, stack.per, tuple(map(len, parts)), hashes), parts)

    def _entries(self, places: Sequence[slice], after: State, has_digests: bool) -> Entries:
        names = tuple(name for place in places for name in self.stack.names[place])
        like = Entry(names[0], *self.stack.kind, bool(self.found), self.is_fresh, 0)
        changed = np.concatenate([self.changed[place] for place in places]).astype(np.uint64)
        return Entries(names, like, changed, after.digests_of(names) if has_digests else None)


# --- files -------------------------------------------------------------------------------------------------------


def _makings(old: Weights, new: Weights, coo: bool) -> list[_Making]:
    """All tensors: those that keep their kind, those that are new or of another kind, and those that end."""
    before, after = kinds_in(old), kinds_in(new)
    same = {name: kind for name, kind in after.items() if before.get(name) == kind}
    changing = [TensorStack((name,), kind) for name, kind in same.items()] if coo else stacks_of(same)
    fresh = stacks_of({name: kind for name, kind in after.items() if name not in same})
    ending = stacks_of({name: kind for name, kind in before.items() if name not in same})
    return [
        *(_Making.of(stack, old, new) for stack in changing),
        *(_Making.of(stack, None, new) for stack in fresh),
        *(_Making.of(stack, old, None) for stack in ending),
    ]


def _make(old: Weights, new: Weights, kind: str, before: State | None, coo: bool, options: _MakeOptions) -> Delta:
    if before is not None:
        _check_known(before, old)
    makings = _makings(old, new, coo)
    jobs = [job for making in makings for job in making.jobs(before is not None, coo)]
    keep = _keep(options.spool)

    def work(job: _Job) -> _Done:
        return job.run().kept(keep)

    for job, done in zip(jobs, in_order(work, jobs, options.threads), strict=True):
        job.making.gather(job.block, done)
        if options.progress and job.making.new is not None:
            options.progress(job.making.stack.nbytes(job.block))
    removed = [name for name in old if name not in new]
    return _pack(makings, removed, kind, before, keep, options.part)


def _keep(spool: IO[bytes] | None) -> Callable[[bytes], BlockData]:
    """Stores encoded blocks in the spool, or in memory."""
    return Spool(spool).keep if spool else lambda data: data


def _pack(
    makings: Sequence[_Making],
    removed: Sequence[str],
    kind: str,
    before: State | None,
    keep: Callable[[bytes], BlockData],
    part: bool,
) -> Delta:
    known = before or _known(makings)
    changed = [(one.stack.names, one.stack.kind[:2], one.after(known)) for one in makings if one.is_changed]
    after = known.after(changed, removed)
    partial_file = part or any(one.stack.kind[2] for one in makings)
    has_digests = partial_file or kind == ANCHOR or any(one.found for one in makings)
    packed = [one for making in makings if (one := making.packed(after, keep, has_digests))]
    made = pack(
        packed,
        kind=kind,
        before="" if partial_file or kind == ANCHOR else known.hex,
        after="" if partial_file else after.hex,
        removed=removed,
    )
    return replace(made, result=after)


def _known(makings: Sequence[_Making]) -> State:
    """The state of the old weights."""
    held = [(one.stack.names, one.stack.kind[:2], one.base) for one in makings if one.old is not None]
    return State({}).after(held)


def _check_known(before: State, old: Weights) -> None:
    have, know = {name: kind[:2] for name, kind in kinds_in(old).items()}, before.kinds
    if have != know:
        name = min(name for name in {**have, **know} if have.get(name) != know.get(name))
        raise CheckpointError(
            f"tensor {name!r}: the state `before` does not match the old weights",
            hint="pass before=digest(old), or omit it",
        )
