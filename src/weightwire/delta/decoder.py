"""Decodes a delta block by block, and checks that it fits its base.

`patcher` and `absolute` use it to apply a delta completely or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import Digest, Patch, decode_coo, read_coo
from weightwire.delta.file import ANCHOR, Delta, Entry
from weightwire.delta.state import State, digest
from weightwire.errors import CheckpointError, WrongBase
from weightwire.system import Progress
from weightwire.weights import Bits, Tensor, Weights, read_weights

__all__ = [
    "BlockJob",
    "changed_by",
    "changes",
    "check_state",
    "check_tensor",
    "check_tensors",
    "coo_changes",
    "covered",
    "decode_job",
    "jobs_of",
    "naming",
    "open_delta",
    "write_block",
]

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

    Positions count units from the start of the tensor. Reads only the bytes of these rows. Digests are not verified:
    only a whole tensor has one.
    """
    opened, weights = open_delta(delta), read_weights(base)
    if name not in opened.entries and name in weights:
        return np.zeros(0, np.int64), weights[name].bits[:0]
    entry = opened.entries[name]
    if not entry.coo:
        check_tensors(opened, weights, [entry])
    layout = entry.layout
    held = entry.rows or (0, entry.shape[0] if entry.shape else 1)
    if rows and not held[0] <= rows[0] <= rows[1] <= held[1]:
        raise CheckpointError(
            f"{opened.where}: tensor {name!r}: does not have rows {rows[0]} to {rows[1]}",
            hint=f"pass rows between {held[0]} and {held[1]}",
        )
    first, last = (row - held[0] for row in rows or held)
    first_unit, last_unit = (first * layout.row, last * layout.row) if layout.row else (0, layout.count)
    bits = None if entry.fresh or entry.coo else covered(weights[name], entry)
    wanted = range(layout.blocks) if entry.coo else layout.blocks_of_rows(first, last)
    positions, values = [np.zeros(0, np.int64)], [np.zeros(0, f"<u{entry.dtype.unit}")]
    for job in jobs_of(opened, {name: entry}, wanted):
        found = decode_job(opened, job, bits)
        begin, end = layout.span(job.index)
        at = np.arange(end - begin) if found.positions is None else np.frombuffer(found.positions, "<u4")
        positions.append(at.astype(np.int64) + begin)
        values.append(np.frombuffer(found.values, f"<u{entry.dtype.unit}"))
    where, what = np.concatenate(positions), np.concatenate(values)
    inside = (where >= first_unit) & (where < last_unit)
    return where[inside] + held[0] * layout.row, what[inside]


# --- the base ----------------------------------------------------------------------------------------------------


def check_tensors(delta: Delta, base: Weights, entries: Iterable[Entry]) -> None:
    """Checks that the base has the tensors and rows that the delta changes."""
    for entry in entries:
        name, tensor = entry.name, base.get(entry.name)
        if entry.fresh:
            continue
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
    unknown = [entry.name for entry in delta.entries.values() if not entry.fresh and entry.name not in state.tensors]
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


def check_tensor(delta: Delta, entry: Entry, changed: int, tensor: Digest) -> None:
    """Checks the number of changed units and the new digest of a tensor."""
    if changed != entry.changed:
        delta.corrupt(f"changes {changed:,} weights, but claims {entry.changed:,}", entry.name)
    if tensor != entry.digest:
        delta.corrupt("the result has a wrong digest, or the base is not the right one", entry.name)


# --- blocks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockJob:
    """A block to decode, or one that is already a patch."""

    entry: Entry
    index: int
    patch: Patch | None = None


def jobs_of(delta: Delta, entries: Mapping[str, Entry], only: range | None = None) -> Iterator[BlockJob]:
    """The jobs for all blocks of the entries, or only for some."""
    for entry in entries.values():
        if entry.coo:
            data = memoryview(delta.block(entry, 0))
            try:
                for index, positions, values in decode_coo(data, entry.layout, entry.changed):
                    yield BlockJob(entry, index, Patch(positions, values))
            except ValueError as problem:
                delta.corrupt(str(problem), entry.name)
            continue
        for index in range(len(entry.blocks)) if only is None else only:
            if entry.blocks[index]:
                yield BlockJob(entry, index)
            elif entry.fresh:
                delta.corrupt(f"block {index}: is empty", entry.name)


def coo_changes(
    delta: Delta, entries: Iterable[Entry]
) -> Iterator[tuple[Entry, npt.NDArray[np.unsignedinteger[Any]], Bits]]:
    """The positions and new units of each coo entry. Entries that are neighbours in the file are read at once."""
    for several in _neighbours(entries):
        first = several[0].start
        data = memoryview(delta.fetch(first, several[-1].start + several[-1].nbytes))
        for entry in several:
            begin = entry.start - first
            try:
                positions, values = read_coo(data[begin : begin + entry.nbytes], entry.layout, entry.changed)
            except ValueError as problem:
                delta.corrupt(str(problem), entry.name)
            yield entry, positions, values


def _neighbours(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    several: list[Entry] = []
    for entry in sorted(entries, key=lambda one: one.start):
        if several and (
            entry.start != several[-1].start + several[-1].nbytes or entry.start - several[0].start > _AT_ONCE
        ):
            yield several
            several = []
        several.append(entry)
    if several:
        yield several


def write_block(delta: Delta, job: BlockJob, bits: Bits) -> tuple[Patch, Digest]:
    """Writes a block into the units that its entry covers. Returns the old units and the change of the digest."""
    entry, index = job.entry, job.index
    if job.patch is not None:
        return job.patch, codec.swap(bits, job.patch, entry.layout, index)
    data = delta.block(entry, index)
    with naming(delta, entry, index):
        return codec.apply(data, bits, entry.layout, index, fresh=entry.fresh)


def covered(target: Tensor, entry: Entry) -> Bits:
    """The rows of a target that an entry covers."""
    if entry.rows is None or entry.rows == target.rows:
        return target.bits
    first = target.rows[0] if target.rows else 0
    row = entry.layout.row
    return target.bits[(entry.rows[0] - first) * row : (entry.rows[1] - first) * row]


@contextmanager
def naming(delta: Delta, entry: Entry, index: int) -> Iterator[None]:
    """Adds file, tensor and block to errors of the codec."""
    try:
        yield
    except ValueError as problem:
        delta.corrupt(f"block {index}: {problem}", entry.name)


def decode_job(delta: Delta, job: BlockJob, bits: Bits | None) -> Patch:
    """The changes of a block, sorted by position. `bits` are the units that its entry covers."""
    if job.patch is not None:
        return job.patch
    with naming(delta, job.entry, job.index):
        base = None if job.entry.fresh else bits
        return codec.decode(delta.block(job.entry, job.index), base, job.entry.layout, job.index)


def changed_by(found: Patch, bits: Bits, entry: Entry, index: int) -> int:
    """The number of units that a written patch changed."""
    unit = entry.dtype.unit
    if found.positions is not None or entry.fresh:
        return len(found.values) // unit
    begin, end = entry.layout.span(index)
    return int(np.count_nonzero(np.frombuffer(found.values, f"<u{unit}") != bits[begin:end]))
