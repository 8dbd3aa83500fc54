"""Applies a delta to its base, in place or as a copy, and verifies the result.

A delta is applied completely or not at all. In place, old values are kept until the digests match, and restored if
they do not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from weightwire import codec
from weightwire.codec import BlockUnits, Digests, Layout, Patch
from weightwire.delta.decoder import (
    BlockJob,
    MemberCounts,
    changed_by,
    changes,
    check_state,
    check_tensors,
    covered,
    jobs_of,
    open_delta,
    units_of,
    write_block,
)
from weightwire.delta.encoded_stack import EncodedStack, Entry
from weightwire.delta.file import ANCHOR, Delta
from weightwire.delta.member_sums import MemberSums
from weightwire.delta.state import State
from weightwire.delta.tensor_stacks import kinds_in
from weightwire.errors import CheckpointError
from weightwire.system import Progress, Stopped, in_order, to_the_end
from weightwire.weights import (
    Bits,
    Checkpoint,
    CheckpointWriter,
    HeldWeights,
    Schema,
    Tensor,
    Weights,
    mark_changed,
    present,
    read_weights,
)

__all__ = ["Applied", "apply_in_place", "changes", "patch", "patch_checkpoint"]


def patch(
    base: Any,
    delta: Delta | bytes | str | os.PathLike[str],
    *,
    copy: bool = False,
    before: State | None = None,
    threads: int | None = None,
) -> Any:
    """Applies a delta to weights in memory, in place or to a copy. Returns the new weights.

    - `base`: a mapping of names to NumPy arrays, torch tensors, `Tensor`s or `(dtype name, shape, buffer)`, or a torch
      module. A copy has values of the same types.
    - `before`: the state of `base` if it is known. Otherwise it is computed first.

    After an error, `base` is unchanged.
    """
    opened, weights = open_delta(delta), read_weights(base)
    check_tensors(opened, weights, opened.stacks)
    if not copy:
        _apply_in_place(base, weights, opened, before, threads)
        return base
    state = check_state(opened, weights, before, threads)
    targets = _copied(weights, opened)
    _write(opened, targets, state, threads)
    given = base if isinstance(base, Mapping) else {}
    return {name: present(tensor, given.get(name)) for name, tensor in targets.items()}


def apply_in_place(
    base: Any,
    delta: Delta | bytes | str | os.PathLike[str],
    before: State | None = None,
    threads: int | None = None,
    *,
    keep: bool = True,
    progress: Progress | None = None,
) -> Applied:
    """Like `patch` in place. Returns the new state, and can undo the change.

    The result holds the old values. Without `keep` there are none: the change cannot be undone, and after an error the
    weights are unusable.
    """
    opened, weights = open_delta(delta), read_weights(base)
    check_tensors(opened, weights, opened.stacks)
    if keep:
        return _apply_in_place(base, weights, opened, before, threads)
    _check_in_place(opened, weights)
    after = _write(opened, weights, check_state(opened, weights, before, threads), threads, progress=progress)
    _tell(base, opened)
    return Applied(after)


def patch_checkpoint(
    base: str | os.PathLike[str],
    delta: Delta | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> State:
    """Applies a delta to a checkpoint on disk and writes the result to `out`, which appears at once. Returns its state.

    `progress` counts all bytes of the base twice: once for the digest, once for the copy.
    """
    opened, checkpoint = open_delta(delta), Checkpoint(base)
    check_tensors(opened, checkpoint, opened.stacks)
    schema = _schema(checkpoint, opened)
    with CheckpointWriter(out, schema=schema, like=checkpoint) as writer:
        state = check_state(opened, checkpoint, None, threads, progress)
        targets = {name: writer[name] for name in schema}
        _fill(targets, checkpoint, opened, threads, progress)
        return _write(opened, targets, state, threads)


# --- checks ------------------------------------------------------------------------------------------------------


def _check_in_place(delta: Delta, base: Weights) -> None:
    held, fresh = kinds_in(base), [stack for stack in delta.stacks if stack.fresh]
    extra = [
        entry.name
        for stack in fresh
        if not all(held.get(name) == (*stack.kind, stack.first.rows) for name in stack.names)
        for entry in stack.entries
        if not _fits(base.get(entry.name), entry)
    ]
    if delta.kind == ANCHOR and delta.after:  # an anchor without `after` is a part: other parts hold the other tensors
        named = {name for stack in fresh for name in stack.names}
        extra += [name for name in base if name not in named]
    if extra or delta.removed:
        name = (extra or list(delta.removed))[0]
        raise CheckpointError(
            f"{delta.where}: tensor {name!r}: cannot be added, removed or reshaped in place",
            hint="patch a copy: patch(base, delta, copy=True)",
        )
    for name in (name for stack in delta.stacks for name in stack.names):
        if not base[name].bits.flags.writeable:
            raise CheckpointError(f"tensor {name!r}: is read-only", hint="patch a copy: patch(base, delta, copy=True)")


def _fits(tensor: Tensor | None, entry: Entry) -> bool:
    """True if a target has the dtype, shape and rows of an entry."""
    if tensor is None or (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
        return False
    if tensor.rows == entry.rows or entry.rows is None:
        return tensor.rows == entry.rows
    return tensor.rows is None or (tensor.rows[0] <= entry.rows[0] and entry.rows[1] <= tensor.rows[1])


def _schema(base: Weights, delta: Delta) -> Schema:
    kept = {} if delta.kind == ANCHOR else {name: (base[name].dtype, base[name].shape) for name in base}
    for name in delta.removed:
        kept.pop(name, None)
    for name, entry in delta.entries.items():
        has_place = delta.kind != ANCHOR and _fits(base.get(name), entry)
        if entry.fresh and entry.rows and not has_place:
            raise CheckpointError(
                f"{delta.where}: holds only rows {entry.rows[0]} to {entry.rows[1]} of tensor {name!r}, "
                "which the base does not have",
                hint="apply it in place, to weights that have the tensor",
            )
        kept[name] = entry.dtype, entry.shape
    return kept


# --- copies ------------------------------------------------------------------------------------------------------


def _copied(base: Weights, delta: Delta) -> dict[str, Tensor]:
    targets = {}
    for name, (dtype, shape) in _schema(base, delta).items():
        rows = base[name].rows if name in base and not _is_replaced(delta, name) else None
        count = len(base[name].bits) if rows else Layout.of(dtype, shape).count
        bits: Bits = np.zeros(count, f"<u{dtype.unit}")
        targets[name] = Tensor(dtype, shape, bits, rows)
        if not _is_replaced(delta, name):
            bits[:] = base[name].bits
    return targets


def _is_replaced(delta: Delta, name: str) -> bool:
    """Whether the delta has the whole tensor, so that nothing is copied from the base."""
    return name in delta.entries and delta.entries[name].fresh and delta.entries[name].rows is None


def _fill(targets: Weights, base: Weights, delta: Delta, threads: int | None, progress: Progress | None) -> None:
    """Copies the tensors that the delta changes or keeps."""

    def work(job: tuple[Bits, Bits]) -> int:
        target, source = job
        target[:] = source
        return target.nbytes

    jobs = [
        (target.bits[begin : begin + codec.BLOCK], base[name].bits[begin : begin + codec.BLOCK])
        for name, target in targets.items()
        if not _is_replaced(delta, name)
        for begin in range(0, len(target.bits), codec.BLOCK)
    ]
    for nbytes in in_order(work, jobs, threads):
        if progress:
            progress(nbytes)


# --- all or nothing ----------------------------------------------------------------------------------------------


@dataclass
class _Written:
    """A block that is being written. Afterwards its patch holds the old units."""

    units: BlockUnits
    job: BlockJob
    patch: Patch | None = None

    def put_back(self) -> None:
        if self.patch is not None:
            codec.swap(self.units, self.patch, self.job.stack.layout.alone(self.job.index), 0)


@dataclass(frozen=True)
class Applied:
    """A delta that was applied in place: the new state, and the old values."""

    state: State
    _put_back: Callable[[], None] | None = field(default=None, repr=False)

    def undo(self) -> None:
        """Restores the old values. Valid only while nothing else has changed the weights. May be called twice."""
        if self._put_back is None:
            raise ValueError("the old values were not kept (keep=False)")
        self._put_back()


def _apply_in_place(base: Any, weights: Weights, delta: Delta, before: State | None, threads: int | None) -> Applied:
    """Keeps the old values, and restores them after an error."""
    _check_in_place(delta, weights)
    state = check_state(delta, weights, before, threads)
    written: list[_Written] = []

    def work(stop: threading.Event) -> State:
        try:
            return _write(delta, weights, state, threads, written, stop)
        except BaseException:
            _put_back(written)
            raise

    def put_back() -> None:
        to_the_end(lambda stop: _put_back(written))
        _tell(base, delta)

    try:
        after = to_the_end(work)
        _tell(base, delta)
        return Applied(after, put_back)
    except BaseException:
        # An interrupt may come after everything was written.
        put_back()
        raise


def _tell(base: Any, delta: Delta) -> None:
    for name in () if isinstance(base, HeldWeights) else delta.entries:
        mark_changed(base, name)


def _put_back(written: list[_Written]) -> None:
    while written:
        written.pop().put_back()


def _write(
    delta: Delta,
    targets: Weights,
    state: State,
    threads: int | None,
    written: list[_Written] | None = None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
) -> State:
    """Writes a delta into targets that hold its base. Returns the new state. Appends every block to `written`."""

    def work(job: BlockJob) -> tuple[Digests, MemberCounts]:
        units = units_of(places, job)
        record = _Written(units, job)
        if written is not None:
            written.append(record)  # before the write: afterwards there may be no memory left
        if stop and stop.is_set():
            raise Stopped
        record.patch, added = write_block(delta, job, units)
        return added, changed_by(record.patch, units, job)

    tied = {} if isinstance(targets, HeldWeights) else _tied(delta, targets)
    places = {**targets, **_copies(tied, targets)} if tied else targets
    known = {stack.first.name: _digests_before(stack, targets, state, threads) for stack in delta.stacks}
    sums = MemberSums(delta)
    jobs = list(jobs_of(delta, delta.stacks))
    for job, (added, changed) in zip(jobs, in_order(work, jobs, threads), strict=True):
        sums.add(job, added, changed)
        if progress:
            progress(job.nbytes)
    sums.check(lambda stack: known[stack.first.name])
    for name, other in tied.items():
        one, two = (_digest_after(delta, name, known, sums) for name in (name, other))
        if one != two:
            _refuse_tied(delta, other, name)
    after = _state_after(delta, targets, state, known, sums)
    if delta.after and after.hex != delta.after:
        delta.corrupt("the result has a wrong state, or the base is not the right one")
    if stop and stop.is_set():
        raise Stopped
    return after


def _copies(tied: Iterable[str], targets: Weights) -> dict[str, Tensor]:
    """Copies of tied tensors, to be written instead: their memory is written under another name."""
    return {name: replace(targets[name], bits=targets[name].bits.copy()) for name in tied}


def _tied(delta: Delta, targets: Weights) -> dict[str, str]:
    """Names of tied tensors, each with the name that is written instead."""
    tied: dict[str, str] = {}
    reach: list[tuple[int, int, str]] = []  # the span with the largest end, of all and of those that change
    for begin, end, name in sorted(_spans(delta, targets)):
        for other_begin, other_end, other in reach:
            if begin >= other_end or (other not in delta.entries and name not in delta.entries):
                continue
            both = all(one in delta.entries for one in (other, name))
            if (begin, end) != (other_begin, other_end) or not both:
                _refuse_tied(delta, other, name)
            tied[name] = tied.get(other, other)
        reach = _furthest([*reach, (begin, end, name)], delta)
    return tied


def _refuse_tied(delta: Delta, one: str, other: str) -> NoReturn:
    raise CheckpointError(
        f"{delta.where}: tensors {one!r} and {other!r}: share memory, but get different weights",
        hint="patch a copy: patch(base, delta, copy=True)",
    )


def _furthest(spans: list[tuple[int, int, str]], delta: Delta) -> list[tuple[int, int, str]]:
    """Of the spans so far, those that can overlap with a later one."""
    of_all = max(spans, key=lambda span: span[1])
    changing = [span for span in spans if span[2] in delta.entries]
    return [of_all] if not changing else list(dict.fromkeys([of_all, max(changing, key=lambda span: span[1])]))


def _spans(delta: Delta, targets: Weights) -> Iterator[tuple[int, int, str]]:
    """The memory spans of all tensors. Of a tensor that changes, only the rows that do."""
    for name, target in targets.items():
        bits = covered(target, delta.entries[name]) if name in delta.entries else target.bits
        if bits.nbytes:
            begin = bits.__array_interface__["data"][0]
            yield begin, begin + bits.nbytes, name


def _digest_after(delta: Delta, name: str, known: Mapping[str, Digests], sums: MemberSums) -> list[int]:
    """The digest of the covered rows of a tensor, after the change."""
    stack = delta.stack_of[name]
    at = stack.names.index(name)
    after: list[int] = (known[stack.first.name][at] + sums.added(stack)[at]).tolist()
    return after


def _state_after(delta: Delta, targets: Weights, state: State, known: Mapping[str, Digests], sums: MemberSums) -> State:
    """An entry's digest is that of the tensor, unless it covers only some of the rows."""
    changed = []
    for stack in delta.stacks:
        before, name = known[stack.first.name], stack.first.name
        if stack.first.rows != targets[name].rows and name in state.kinds:
            before = state.digests_of(stack.names)
        changed.append((stack.names, stack.kind, before + sums.added(stack)))
    return state.after(changed, delta.removed)


def _digests_before(stack: EncodedStack, targets: Weights, state: State, threads: int | None) -> Digests:
    """The current digests of the rows that the entries of a stack cover."""
    rows = {targets[name].rows for name in stack.names}
    if not stack.fresh and rows == {stack.first.rows} and all(name in state.kinds for name in stack.names):
        return state.digests_of(stack.names)
    found = np.zeros((len(stack.entries), 2), np.uint64)

    def work(job: BlockJob) -> Digests:
        return codec.digest(units_of(targets, job), stack.layout.alone(job.index), 0)

    jobs = [BlockJob(stack, index) for index in range(stack.layout.blocks)]
    for job, digests in zip(jobs, in_order(work, jobs, threads), strict=True):
        found[stack.place(job.index)] += digests
    return found
