"""5 apply: base weights and a delta -> the weights after it, verified, in place or as a copy.

Either all of a delta is applied or none of it. In place, what was overwritten is kept until the digests match, and
put back if they do not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.checkpoint import CheckpointWriter, Schema
from weightwire.codec import Lanes, Layout, Patch
from weightwire.codec.coo import decode_coo
from weightwire.delta import ANCHOR, Delta, Entry
from weightwire.errors import CheckpointError, WrongBase
from weightwire.state import State, TensorState, add, digest
from weightwire.weights import Bits, Checkpoint, Tensor, Weights, mark_changed, present, read_weights
from weightwire.workers import Progress, Stopped, in_order, to_the_end

__all__ = ["changes", "patch", "patch_checkpoint"]

_OTHER_BASE = "apply it to the weights it was made from"


def patch(
    base: Any,
    delta: Delta | bytes | str | os.PathLike[str],
    *,
    copy: bool = False,
    before: State | None = None,
    threads: int | None = None,
) -> Any:
    """Applies a delta to weights in memory: in place, or to a copy. Returns the weights after it.

    `base` is a mapping of names to NumPy arrays, torch tensors, `Tensor`s or `(dtype name, shape, buffer)`, or a torch
    module. A copy has the same kinds of values. `before` is the base's state where that is known; else all of it is
    digested first. Wherever this fails, `base` is as it was.
    """
    opened, weights = _open(delta), read_weights(base)
    _check_tensors(opened, weights, opened.entries.values())
    if not copy:
        _check_in_place(opened, weights)
    state = _check_state(opened, weights, before, threads)
    if not copy:
        _apply(opened, weights, state, threads, keep=True)
        for name in opened.entries:
            mark_changed(base, name)
        return base
    targets = _copied(weights, opened)
    _apply(opened, targets, state, threads, keep=False)
    given = base if isinstance(base, Mapping) else {}
    return {name: present(tensor, given.get(name)) for name, tensor in targets.items()}


def patch_checkpoint(
    base: str | os.PathLike[str],
    delta: Delta | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> State:
    """Applies a delta to a checkpoint on disk, and writes the result to `out`, all at once. Returns its state.

    `progress` hears of all weights of the base twice: they are digested, then copied.
    """
    opened, checkpoint = _open(delta), Checkpoint(base)
    _check_tensors(opened, checkpoint, opened.entries.values())
    schema = _schema(checkpoint, opened)
    with CheckpointWriter(out, schema=schema, like=checkpoint) as writer:
        state = _check_state(opened, checkpoint, None, threads, progress)
        targets = {name: writer[name] for name in schema}
        _fill(targets, checkpoint, opened, threads, progress)
        return _apply(opened, targets, state, threads, keep=False)


def changes(
    base: Any, delta: Delta | bytes | str | os.PathLike[str], name: str, rows: tuple[int, int] | None = None
) -> tuple[npt.NDArray[np.int64], Bits]:
    """Where a delta changes one tensor, or its rows from `rows[0]` to before `rows[1]`, and to which units.

    Positions count units from the tensor's beginning. Only the bytes that hold these rows are read. Nothing is verified
    beyond that the bytes make sense: only a whole tensor has a digest.
    """
    opened, weights = _open(delta), read_weights(base)
    if name not in opened.entries and name in weights:
        return np.zeros(0, np.int64), weights[name].bits[:0]
    entry = opened.entries[name]
    if not entry.coo:
        _check_tensors(opened, weights, [entry])
    layout = entry.layout
    held = entry.rows or (0, entry.shape[0] if entry.shape else 1)
    if rows and not held[0] <= rows[0] <= rows[1] <= held[1]:
        raise CheckpointError(
            f"{opened.where}: tensor {name!r}: has no rows {rows[0]} to {rows[1]}",
            hint=f"it has {held[0]} to {held[1]}",
        )
    first, last = (row - held[0] for row in rows or held)
    first_unit, last_unit = (first * layout.row, last * layout.row) if layout.row else (0, layout.count)
    bits = None if entry.fresh or entry.coo else _covered(weights[name], entry)
    wanted = range(layout.blocks) if entry.coo else layout.blocks_of_rows(first, last)
    positions, values = [np.zeros(0, np.int64)], [np.zeros(0, f"<u{entry.dtype.unit}")]
    for job in _jobs(opened, {name: entry}, wanted):
        index, found = job.index, job.patch
        if found is None:
            with _naming(opened, entry, index):
                found = codec.decode(opened.block(entry, index), bits, layout, index)
        begin, end = layout.span(index)
        at = np.arange(end - begin) if found.positions is None else np.frombuffer(found.positions, "<u4")
        positions.append(at.astype(np.int64) + begin)
        values.append(np.frombuffer(found.values, f"<u{entry.dtype.unit}"))
    where, what = np.concatenate(positions), np.concatenate(values)
    inside = (where >= first_unit) & (where < last_unit)
    return where[inside] + held[0] * layout.row, what[inside]


def _open(delta: Delta | bytes | str | os.PathLike[str]) -> Delta:
    if isinstance(delta, Delta):
        return delta
    if isinstance(delta, str | os.PathLike):
        return Delta.open(delta)
    if isinstance(delta, bytes | bytearray | memoryview):
        return Delta.from_bytes(delta)
    raise CheckpointError(f"a {type(delta).__name__} is no delta", hint="pass patch(weights, delta), in this order")


# --- before anything is written ----------------------------------------------------------------------------------


def _check_tensors(delta: Delta, base: Weights, entries: Iterable[Entry]) -> None:
    """That the base has what the delta changes."""
    for entry in entries:
        name, tensor = entry.name, base.get(entry.name)
        if entry.fresh:
            continue
        if tensor is None:
            raise WrongBase(f"{delta.where}: tensor {name!r}: the base has no such tensor", hint=_OTHER_BASE)
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise WrongBase(
                f"{delta.where}: tensor {name!r}: is {entry.dtype.name} {list(entry.shape)}, "
                f"but {tensor.dtype.name} {list(tensor.shape)} in the base",
                hint=_OTHER_BASE,
            )
        whole = 0, entry.shape[0] if entry.shape else 1
        (held_first, held_last), (first, last) = tensor.rows or whole, entry.rows or whole
        if first < held_first or last > held_last:
            raise WrongBase(f"{delta.where}: tensor {name!r}: the base lacks some of its rows", hint=_OTHER_BASE)


def _check_state(
    delta: Delta, base: Weights, before: State | None, threads: int | None, progress: Progress | None = None
) -> State:
    """That the base is what the delta was made for; returns the base's state."""
    if delta.kind == ANCHOR:
        return State({})
    state = before or digest(base, threads=threads, progress=progress)
    unknown = [entry.name for entry in delta.entries.values() if not entry.fresh and entry.name not in state.tensors]
    if unknown:
        raise WrongBase(
            f"{delta.where}: tensor {unknown[0]!r}: its state is not known", hint="pass before=digest(base)"
        )
    if delta.before and state.hex != delta.before:
        raise WrongBase(
            f"{delta.where}: was made for weights with state {delta.before[:12]}, and these have {state.hex[:12]}",
            hint=_OTHER_BASE,
        )
    return state


def _check_in_place(delta: Delta, base: Weights) -> None:
    extra = [name for name, entry in delta.entries.items() if entry.fresh and not _fits(base.get(name), entry)]
    extra += [name for name in base if delta.kind == ANCHOR and name not in delta.entries]
    if extra or delta.removed:
        name = (extra or list(delta.removed))[0]
        raise CheckpointError(
            f"{delta.where}: tensor {name!r}: is added, removed or reshaped, which cannot be done in place",
            hint="patch a copy: patch(base, delta, copy=True)",
        )
    for name in delta.entries:
        if not base[name].bits.flags.writeable:
            raise CheckpointError(f"tensor {name!r}: is read-only", hint="patch a copy: patch(base, delta, copy=True)")


def _fits(tensor: Tensor | None, entry: Entry) -> bool:
    return tensor is not None and (tensor.dtype, tensor.shape, tensor.rows) == (
        entry.dtype,
        entry.shape,
        entry.rows,
    )


def _schema(base: Weights, delta: Delta) -> Schema:
    kept = {} if delta.kind == ANCHOR else {name: (base[name].dtype, base[name].shape) for name in base}
    for name in delta.removed:
        kept.pop(name, None)
    for name, entry in delta.entries.items():
        if entry.fresh and entry.rows:
            raise CheckpointError(
                f"{delta.where}: tensor {name!r}: holds rows {entry.rows[0]} to {entry.rows[1]} of a new tensor only",
                hint="apply it in place to weights that have the tensor",
            )
        kept[name] = entry.dtype, entry.shape
    return kept


# --- room for the result -----------------------------------------------------------------------------------------


def _copied(base: Weights, delta: Delta) -> dict[str, Tensor]:
    targets = {}
    for name, (dtype, shape) in _schema(base, delta).items():
        rows = base[name].rows if name in base and not _is_fresh(delta, name) else None
        count = len(base[name].bits) if rows else Layout.of(dtype, shape).count
        bits: Bits = np.zeros(count, f"<u{dtype.unit}")
        targets[name] = Tensor(dtype, shape, bits, rows)
        if not _is_fresh(delta, name):
            bits[:] = base[name].bits
    return targets


def _is_fresh(delta: Delta, name: str) -> bool:
    return name in delta.entries and delta.entries[name].fresh


def _fill(targets: Weights, base: Weights, delta: Delta, threads: int | None, progress: Progress | None) -> None:
    """Copies what the delta builds on."""

    def work(job: tuple[Bits, Bits]) -> int:
        target, source = job
        target[:] = source
        return target.nbytes

    jobs = [
        (target.bits[begin : begin + codec.BLOCK], base[name].bits[begin : begin + codec.BLOCK])
        for name, target in targets.items()
        if not _is_fresh(delta, name)
        for begin in range(0, len(target.bits), codec.BLOCK)
    ]
    for nbytes in in_order(work, jobs, threads):
        if progress:
            progress(nbytes)


# --- all or nothing ----------------------------------------------------------------------------------------------


@dataclass
class _Written:
    """A block that has been written, or is about to be; its patch then holds what was there before."""

    bits: Bits
    layout: Layout
    index: int
    patch: Patch | None = None

    def take_back(self) -> None:
        if self.patch is not None:
            codec.swap(self.bits, self.patch, self.layout, self.index)


def _apply(delta: Delta, targets: Weights, state: State, threads: int | None, *, keep: bool) -> State:
    """Writes a delta into targets that hold its base; returns the state after it.

    `keep`: what was overwritten is kept, and put back if anything is wrong.
    """
    if not keep:
        return _write(delta, targets, state, threads, None, threading.Event())

    written: list[_Written] = []

    def work(stop: threading.Event) -> State:
        try:
            return _write(delta, targets, state, threads, written, stop)
        except BaseException:
            _take_back(written)
            raise

    try:
        return to_the_end(work)
    except BaseException:
        # There is still something to take back where all went well, and an interrupt came at the last moment.
        to_the_end(lambda stop: _take_back(written))
        raise


def _take_back(written: list[_Written]) -> None:
    while written:
        written.pop().take_back()


def _write(
    delta: Delta,
    targets: Weights,
    state: State,
    threads: int | None,
    written: list[_Written] | None,
    stop: threading.Event,
) -> State:
    def work(job: _Job) -> tuple[Lanes, int]:
        entry, index = job.entry, job.index
        bits = _covered(targets[entry.name], entry)
        record = _Written(bits, entry.layout, index)
        if written is not None:
            written.append(record)  # before anything is written, lest there be no memory left for it afterwards
        if stop.is_set():
            raise Stopped
        if job.patch is not None:
            found, lanes = job.patch, codec.swap(bits, job.patch, entry.layout, index)
        else:
            data = delta.block(entry, index)
            with _naming(delta, entry, index):
                found, lanes = codec.apply(data, bits, entry.layout, index, fresh=entry.fresh)
        record.patch = found
        return lanes, _changed_by(found, bits, entry, index)

    tied = _tied(delta, targets)
    covered = {name: _digest_before(entry, targets[name], state) for name, entry in delta.entries.items()}
    added = dict.fromkeys(delta.entries, (0, 0))
    changed = dict.fromkeys(delta.entries, 0)
    jobs = list(_jobs(delta, {name: entry for name, entry in delta.entries.items() if name not in tied}))
    for job, (lanes, count) in zip(jobs, in_order(work, jobs, threads), strict=True):
        added[job.entry.name] = add(added[job.entry.name], lanes)
        changed[job.entry.name] += count
    for name, other in tied.items():
        added[name], changed[name] = added[other], changed[other]
    for name, entry in delta.entries.items():
        _check_tensor(delta, entry, changed[name], add(covered[name], added[name]))
    after = _state_after(delta, targets, state, added)
    if delta.after and after.hex != delta.after:
        delta.corrupt("the result has another state than it should")
    if stop.is_set():
        raise Stopped
    return after


def _tied(delta: Delta, targets: Weights) -> dict[str, str]:
    """Names whose tensor is the very memory of another one: what is written for that one is theirs too."""
    tied: dict[str, str] = {}
    reach: list[tuple[int, int, str]] = []  # the span that reaches furthest, and the one of those that change
    for begin, end, name in sorted(_spans(delta, targets)):
        for other_begin, other_end, other in reach:
            if begin >= other_end or (other not in delta.entries and name not in delta.entries):
                continue
            digests = {delta.entries[one].digest if one in delta.entries else None for one in (other, name)}
            if (begin, end) != (other_begin, other_end) or len(digests) > 1:
                raise CheckpointError(
                    f"{delta.where}: tensors {other!r} and {name!r}: share memory, but become different weights",
                    hint="patch a copy: patch(base, delta, copy=True)",
                )
            tied[name] = tied.get(other, other)
        reach = _furthest([*reach, (begin, end, name)], delta)
    return tied


def _furthest(spans: list[tuple[int, int, str]], delta: Delta) -> list[tuple[int, int, str]]:
    """Of spans that begin before all that are to come, those that can still overlap with one."""
    of_all = max(spans, key=lambda span: span[1])
    changing = [span for span in spans if span[2] in delta.entries]
    return [of_all] if not changing else list(dict.fromkeys([of_all, max(changing, key=lambda span: span[1])]))


def _spans(delta: Delta, targets: Weights) -> Iterator[tuple[int, int, str]]:
    """Where tensors lie in memory: of those that change, what does."""
    for name, target in targets.items():
        bits = _covered(target, delta.entries[name]) if name in delta.entries else target.bits
        if bits.nbytes:
            begin = bits.__array_interface__["data"][0]
            yield begin, begin + bits.nbytes, name


def _state_after(delta: Delta, targets: Weights, state: State, added: Mapping[str, Lanes]) -> State:
    """An entry's digest is that of the tensor, unless it covers only some of the rows that are here."""
    known = {
        name: TensorState(
            entry.dtype,
            entry.shape,
            entry.digest
            if entry.fresh or entry.rows == targets[name].rows
            else add(state.tensors[name].digest, added[name]),
        )
        for name, entry in delta.entries.items()
    }
    return state.replace(known, delta.removed)


def _check_tensor(delta: Delta, entry: Entry, changed: int, lanes: Lanes) -> None:
    if changed != entry.changed:
        delta.corrupt(f"changes {changed:,} weights, not {entry.changed:,} as it says", entry.name)
    if lanes != entry.digest:
        delta.corrupt(
            "the result has another digest than it should (or its base was not what it was made for)", entry.name
        )


@dataclass(frozen=True)
class _Job:
    """A block of a tensor to deal with: to be read and decoded, or a patch as it stands."""

    entry: Entry
    index: int
    patch: Patch | None = None


def _jobs(delta: Delta, entries: Mapping[str, Entry], only: range | None = None) -> Iterator[_Job]:
    """What there is to do, of all blocks or only of some."""
    for entry in entries.values():
        if entry.coo:
            data = memoryview(delta.block(entry, 0))
            try:
                for index, positions, values in decode_coo(data, entry.layout, entry.changed):
                    yield _Job(entry, index, Patch(positions, values))
            except ValueError as problem:
                delta.corrupt(str(problem), entry.name)
            continue
        for index in range(len(entry.blocks)) if only is None else only:
            if entry.blocks[index]:
                yield _Job(entry, index)
            elif entry.fresh:
                delta.corrupt(f"block {index}: it is empty", entry.name)


def _covered(target: Tensor, entry: Entry) -> Bits:
    """The rows of a target that an entry speaks of."""
    if entry.rows is None or entry.rows == target.rows:
        return target.bits
    first = target.rows[0] if target.rows else 0
    row = entry.layout.row
    return target.bits[(entry.rows[0] - first) * row : (entry.rows[1] - first) * row]


@contextmanager
def _naming(delta: Delta, entry: Entry, index: int) -> Iterator[None]:
    """The codec knows only what is wrong with a block; here it is known which one."""
    try:
        yield
    except ValueError as problem:
        delta.corrupt(f"block {index}: {problem}", entry.name)


def _changed_by(found: Patch, bits: Bits, entry: Entry, index: int) -> int:
    """How many units a patch that has been written changed."""
    unit = entry.dtype.unit
    if found.positions is not None or entry.fresh:
        return len(found.values) // unit
    begin, end = entry.layout.span(index)
    return int(np.count_nonzero(np.frombuffer(found.values, f"<u{unit}") != bits[begin:end]))


def _digest_before(entry: Entry, target: Tensor, state: State) -> Lanes:
    """The digest of what an entry covers, as it is now."""
    known = state.tensors.get(entry.name)
    if known and not entry.fresh and entry.rows == target.rows:
        return known.digest
    lanes = (0, 0)
    bits = _covered(target, entry)
    for index in range(entry.layout.blocks):
        lanes = add(lanes, codec.digest(bits, entry.layout, index))
    return lanes
