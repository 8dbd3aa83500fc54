"""Decodes a delta block by block, and checks that it fits its base.

`patcher` and `absolute` use it to apply a delta completely or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import BlockUnits, Digests, Patch, decode_coo, read_coo
from weightwire.delta.encoded_stack import EncodedStack, Entry
from weightwire.delta.file import ANCHOR, Delta
from weightwire.delta.state import State, digest
from weightwire.delta.tensor_stacks import kinds_in
from weightwire.errors import CheckpointError, WrongBase
from weightwire.system import Progress
from weightwire.weights import Bits, Tensor, Weights, read_weights

__all__ = [
    "BlockJob",
    "MemberCounts",
    "changed_by",
    "changes",
    "check_state",
    "check_tensors",
    "coo_changes",
    "covered",
    "decode_job",
    "jobs_of",
    "naming",
    "open_delta",
    "units_of",
    "write_block",
]

MemberCounts = npt.NDArray[np.int64]
"""Numbers of changed units of a block's members."""

_AT_ONCE = 8 << 20  # bytes
_OTHER_BASE = "apply it to the weights it was made from"


def open_delta(delta: Delta | bytes | str | os.PathLike[str]) -> Delta:
    if isinstance(delta, Delta):
        return delta
    if isinstance(delta, str | os.PathLike):
        return Delta.open(delta)
    if isinstance(delta, bytes | bytearray | memoryview):
        return Delta.from_bytes(delta)
    raise CheckpointError(
        f"a delta cannot be read from {type(delta).__name__}", hint="call patch(weights, delta), in this order"
    )


def changes(
    base: Any, delta: Delta | bytes | str | os.PathLike[str], name: str, rows: tuple[int, int] | None = None
) -> tuple[npt.NDArray[np.int64], Bits]:
    """The positions and new units of a tensor, or of its rows from `rows[0]` to before `rows[1]`.

    Positions count units from the start of the tensor. Reads only the blocks that hold these rows, and verifies their
    hashes. The state of the result is not verified: it needs all weights.
    """
    opened, weights = open_delta(delta), read_weights(base)
    if name not in opened.entries and name in weights:
        return np.zeros(0, np.int64), weights[name].bits[:0]
    entry, stack = opened.entries[name], opened.stack_of[name]
    if not entry.coo:
        check_tensors(opened, weights, [stack])
    layout = entry.layout
    held = entry.rows or (0, entry.shape[0] if entry.shape else 1)
    if rows and not held[0] <= rows[0] <= rows[1] <= held[1]:
        raise CheckpointError(
            f"{opened.where}: tensor {name!r}: does not have rows {rows[0]} to {rows[1]}",
            hint=f"pass rows between {held[0]} and {held[1]}",
        )
    first, last = (row - held[0] for row in rows or held)
    first_unit, last_unit = (first * layout.row, last * layout.row) if layout.row else (0, layout.count)
    where, what = _changes_of(opened, weights, name, (first, last))
    inside = (where >= first_unit) & (where < last_unit)
    return where[inside] + held[0] * layout.row, what[inside]


def _changes_of(delta: Delta, base: Weights, name: str, rows: tuple[int, int]) -> tuple[npt.NDArray[np.int64], Bits]:
    """The changes in the blocks that hold these rows. Positions count from the first unit of the entry."""
    entry, stack = delta.entries[name], delta.stack_of[name]
    positions, values = [np.zeros(0, np.int64)], [np.zeros(0, f"<u{entry.dtype.unit}")]
    for job in jobs_of(delta, [stack], None if entry.coo else delta.blocks_of(name, rows)):
        units = None if entry.fresh or entry.coo else units_of(base, job)
        at, new = _listed(decode_job(delta, job, units), units, entry)
        begin, _ = stack.layout.span(job.index)
        skipped = job.members.index(entry) * entry.layout.count if len(stack.entries) > 1 else -begin
        positions.append(at.astype(np.int64) - skipped)
        values.append(new)
    return np.concatenate(positions), np.concatenate(values)


def _listed(found: Patch, units: BlockUnits | None, entry: Entry) -> tuple[npt.NDArray[Any], Bits]:
    """The positions of changes in a block, and the new units. Without a base, all units are changes."""
    new = np.frombuffer(found.values, f"<u{entry.dtype.unit}")
    if found.positions is not None:
        return np.frombuffer(found.positions, "<u4"), new
    if units is None:
        return np.arange(len(new)), new
    at = np.flatnonzero(np.concatenate(units if isinstance(units, tuple) else (units,)) != new)
    return at, new[at]


# --- the base ----------------------------------------------------------------------------------------------------


def check_tensors(delta: Delta, base: Weights, stacks: Iterable[EncodedStack]) -> None:
    """Checks that the base has the tensors and rows that the delta changes."""
    held = kinds_in(base)
    for stack in stacks:
        wanted = (*stack.kind, stack.first.rows)
        if not stack.fresh and not all(held.get(name) == wanted for name in stack.names):
            _check_entries(delta, base, stack.entries)
    for name in delta.removed:
        if name not in held:
            raise WrongBase(f"{delta.where}: tensor {name!r}: to be removed, but missing in the base", hint=_OTHER_BASE)


def _check_entries(delta: Delta, base: Weights, entries: Iterable[Entry]) -> None:
    """Tensor by tensor: the base may hold more rows."""
    for entry in entries:
        name, tensor = entry.name, base.get(entry.name)
        if tensor is None:
            raise WrongBase(f"{delta.where}: tensor {name!r}: missing in the base", hint=_OTHER_BASE)
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise WrongBase(
                f"{delta.where}: tensor {name!r}: is {entry.dtype.name} {list(entry.shape)}, "
                f"but {tensor.dtype.name} {list(tensor.shape)} in the base",
                hint=_OTHER_BASE,
            )
        whole = 0, entry.shape[0] if entry.shape else 1
        (held_first, held_last), (first, last) = tensor.rows or whole, entry.rows or whole
        if first < held_first or last > held_last:
            raise WrongBase(f"{delta.where}: tensor {name!r}: some rows are missing in the base", hint=_OTHER_BASE)


def check_state(
    delta: Delta, base: Weights, before: State | None, threads: int | None, progress: Progress | None = None
) -> State:
    """Checks that the delta was made for this base. Returns the state of the base."""
    if delta.kind == ANCHOR:
        return State({})
    state = before or digest(base, threads=threads, progress=progress)
    unknown = [name for stack in delta.stacks if not stack.fresh for name in stack.names if name not in state.kinds]
    if unknown:
        raise WrongBase(
            f"{delta.where}: tensor {unknown[0]!r}: missing in the state `before`", hint="pass before=digest(base)"
        )
    if delta.before and state.hex != delta.before:
        raise WrongBase(
            f"{delta.where}: made for weights with state {delta.before[:12]}, but these have {state.hex[:12]}",
            hint=_OTHER_BASE,
        )
    return state


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockJob:
    """A block to decode, or one that is already a patch."""

    stack: EncodedStack
    index: int
    patch: Patch | None = None

    @property
    def entry(self) -> Entry:
        """The only entry of its stack, or the first one."""
        return self.stack.first

    @property
    def members(self) -> tuple[Entry, ...]:
        return self.stack.members(self.index)

    @property
    def names(self) -> tuple[str, ...]:
        return self.stack.names[self.stack.place(self.index)]

    @property
    def nbytes(self) -> int:
        """The size of its units."""
        begin, end = self.stack.layout.span(self.index)
        return (end - begin) * self.entry.dtype.unit


def jobs_of(delta: Delta, stacks: Iterable[EncodedStack], only: range | None = None) -> Iterator[BlockJob]:
    """The jobs for all blocks of the stacks, or only for some."""
    for stack in stacks:
        if stack.coo:
            data = memoryview(delta.block(stack, 0))
            try:
                for index, positions, values in decode_coo(data, stack.layout, stack.first.changed):
                    yield BlockJob(stack, index, Patch(positions, values))
            except ValueError as problem:
                delta.corrupt(str(problem), stack.first.name)
            continue
        for index in range(len(stack.blocks)) if only is None else only:
            if stack.blocks[index]:
                yield BlockJob(stack, index)
            elif stack.fresh:
                delta.corrupt(f"{stack.label}: block {index}: is empty")


def coo_changes(
    delta: Delta, entries: Iterable[Entry]
) -> Iterator[tuple[Entry, npt.NDArray[np.unsignedinteger[Any]], Bits]]:
    """The positions and new units of each coo entry. Entries that are neighbours in the file are read at once."""
    for several in _neighbours([delta.stack_of[entry.name] for entry in entries]):
        first = several[0].start
        data = memoryview(delta.fetch(first, several[-1].start + several[-1].nbytes))
        for stack in several:
            begin = stack.start - first
            piece = data[begin : begin + stack.nbytes]
            delta.check_hash(stack, 0, piece)
            try:
                positions, values = read_coo(piece, stack.layout, stack.first.changed)
            except ValueError as problem:
                delta.corrupt(str(problem), stack.first.name)
            yield stack.first, positions, values


def _neighbours(stacks: Iterable[EncodedStack]) -> Iterator[list[EncodedStack]]:
    several: list[EncodedStack] = []
    for stack in sorted(stacks, key=lambda one: one.start):
        if several and (
            stack.start != several[-1].start + several[-1].nbytes or stack.start - several[0].start > _AT_ONCE
        ):
            yield several
            several = []
        several.append(stack)
    if several:
        yield several


def units_of(targets: Weights, job: BlockJob) -> BlockUnits:
    """The units that a block covers."""
    if len(job.stack.entries) > 1:
        return tuple(targets[name].bits for name in job.names)
    begin, end = job.stack.layout.span(job.index)
    return covered(targets[job.entry.name], job.entry)[begin:end]


def write_block(delta: Delta, job: BlockJob, units: BlockUnits) -> tuple[Patch, Digests]:
    """Writes a block into its units. Returns the old units and the changes of the digests."""
    alone = job.stack.layout.alone(job.index)
    if job.patch is not None:
        return job.patch, codec.swap(units, job.patch, alone, 0)
    data = delta.block(job.stack, job.index)
    with naming(delta, job):
        return codec.apply(data, units, alone, 0, fresh=job.stack.fresh)


def covered(target: Tensor, entry: Entry) -> Bits:
    """The rows of a target that an entry covers."""
    if entry.rows is None or entry.rows == target.rows:
        return target.bits
    first = target.rows[0] if target.rows else 0
    row = entry.layout.row
    return target.bits[(entry.rows[0] - first) * row : (entry.rows[1] - first) * row]


@contextmanager
def naming(delta: Delta, job: BlockJob) -> Iterator[None]:
    """Adds file, tensor and block to errors of the codec."""
    try:
        yield
    except ValueError as problem:
        delta.corrupt(f"{job.stack.label}: block {job.index}: {problem}")


def decode_job(delta: Delta, job: BlockJob, units: BlockUnits | None) -> Patch:
    """The changes of a block, sorted by position. Without a base, `units` is None."""
    if job.patch is not None:
        return job.patch
    with naming(delta, job):
        base = None if job.stack.fresh else units
        data = delta.block(job.stack, job.index)
        return codec.decode(data, base, job.stack.layout.alone(job.index), 0)


def changed_by(found: Patch, units: BlockUnits, job: BlockJob) -> MemberCounts:
    """The number of units that a written patch changed, by member."""
    layout, unit, members = job.stack.layout.alone(job.index), job.entry.dtype.unit, len(job.names)
    if job.stack.fresh:
        return np.full(members, layout.count // members)
    if found.positions is None:
        old = np.frombuffer(found.values, f"<u{unit}").reshape(members, -1)
        new = units if isinstance(units, tuple) else (units,)
        return np.array([np.count_nonzero(a != b) for a, b in zip(old, new, strict=True)])
    if members == 1:
        return np.array([len(found.values) // unit])
    return np.bincount(np.frombuffer(found.positions, "<u4") // layout.segment, minlength=members)
