"""Turns the files of a version into one patch of absolute values, which needs no base and can be applied twice.

Replicas replay it from their journal, and engines without a base apply it. It consists of `coo` entries, and of `fresh`
entries if the whole tensor is smaller than its changes. Digests verify the result before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import Digest, Layout
from weightwire.delta.decoder import (
    BlockJob,
    changed_by,
    check_state,
    check_tensor,
    check_tensors,
    covered,
    decode_job,
    jobs_of,
    write_block,
)
from weightwire.delta.file import Delta, Entry, Packed, pack
from weightwire.delta.state import State, TensorState, add_digests
from weightwire.errors import CorruptDelta, SchemaChanged, WrongBase
from weightwire.system import in_order
from weightwire.weights import Bits, Tensor, Weights, schema_of_weights

__all__ = ["make_absolute", "merge_absolute", "write_absolute"]

_HEAD = 8  # bytes of a coo entry before its positions


def make_absolute(
    weights: Weights, deltas: Sequence[Delta], before: State, after: str = "", *, threads: int | None = None
) -> Delta:
    """Combines the files of one version into a patch for weights with state `before`. Writes nothing.

    A version has one file per rank that published it, or none if nothing changed. If `after` is given, the result must
    have that state.
    """
    for delta in deltas:
        check_tensors(delta, weights, delta.entries.values())
        _check_schema(delta, weights)
        check_state(delta, weights, before, threads)
    parts = _by_tensor(deltas)
    dense = {name for name in parts if _is_dense(parts[name])}
    packed = _pack_sparse(weights, {n: p for n, p in parts.items() if n not in dense}, before, threads)
    packed += [_pack_dense(weights[name], parts[name], before, threads) for name in dense]
    state = before.replace({one.entry.name: one.entry.state for one in packed})
    for wanted in {after, *(delta.after for delta in deltas)} - {"", state.hex}:
        where = deltas[0].where if deltas else "version without files"
        raise CorruptDelta(
            f"{where}: the result has state {state.hex[:12]}, expected {wanted[:12]}",
            hint="the file is damaged or belongs to another version: fetch it again",
        )
    return pack(packed, before=before.hex, after=state.hex)


def merge_absolute(weights: Weights, patches: Sequence[Delta], state: State, *, threads: int | None = None) -> Delta:
    """Merges consecutive patches into one. The last patch led to these weights."""
    for one, next_one in pairwise(patches):
        if one.after != next_one.before:
            raise WrongBase(
                f"{next_one.where}: does not follow {one.where}", hint="pass the patches in order and without gaps"
            )
    if patches and patches[-1].after != state.hex:
        raise WrongBase(
            f"{patches[-1].where}: leads to state {patches[-1].after[:12]}, but the weights have {state.hex[:12]}",
            hint="merge patches up to the version of the weights",
        )
    if len(patches) == 1:
        return patches[0]
    names = sorted({name for patch in patches for name in patch.entries})
    packed = in_order(lambda name: _merge_tensor(weights[name], name, patches, state.tensors[name]), names, threads)
    return pack(packed, before=patches[0].before if patches else state.hex, after=state.hex)


def write_absolute(weights: Weights, patch: Delta, *, threads: int | None = None) -> dict[str, Digest]:
    """Writes a patch into whole weights. Returns the change of each tensor's digest."""
    check_tensors(patch, weights, patch.entries.values())
    _check_schema(patch, weights)
    for entry in patch.entries.values():
        if entry.rows or not (entry.coo or entry.fresh):
            patch.corrupt("does not hold absolute values", entry.name)

    def work(step: tuple[Entry, range | None]) -> tuple[str, Digest]:
        entry, only = step
        jobs = jobs_of(patch, {entry.name: entry}, only)
        return entry.name, reduce(
            add_digests, (write_block(patch, job, weights[entry.name].bits)[1] for job in jobs), (0, 0)
        )

    added = dict.fromkeys(patch.entries, (0, 0))
    for name, change in in_order(work, _steps(patch), threads):
        added[name] = add_digests(added[name], change)
    return added


def _steps(patch: Delta) -> Iterator[tuple[Entry, range | None]]:
    """Work items for threads: a whole coo entry (splitting it costs half of the work), or one block."""
    for entry in patch.entries.values():
        yield from [(entry, None)] if entry.coo else ((entry, range(i, i + 1)) for i in range(len(entry.blocks)))


# --- parts of a tensor -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The entry of one file for a tensor, or for some of its rows."""

    delta: Delta
    entry: Entry

    @property
    def first(self) -> int:
        """The first unit that it covers, counted from the start of the tensor."""
        return self.entry.rows[0] * self.entry.layout.row if self.entry.rows else 0


def _check_schema(delta: Delta, weights: Weights) -> None:
    """Checks that no tensor is added, removed or reshaped."""
    held = schema_of_weights(weights)
    other = [entry.name for entry in delta.entries.values() if held.get(entry.name) != (entry.dtype, entry.shape)]
    for name in [*other, *delta.removed][:1]:
        raise SchemaChanged(
            f"{delta.where}: tensor {name!r}: is added, removed or reshaped, which a run does not allow",
            hint="start a new run under another URL",
        )


def _by_tensor(deltas: Iterable[Delta]) -> dict[str, list[_Part]]:
    """The parts of each tensor, sorted by rows."""
    parts: dict[str, list[_Part]] = {}
    for delta in deltas:
        for name, entry in delta.entries.items():
            parts.setdefault(name, []).append(_Part(delta, entry))
    for name, several in parts.items():
        several.sort(key=lambda part: part.first)
        for one, next_one in pairwise(several):
            if one.first + one.entry.layout.count > next_one.first:
                next_one.delta.corrupt(f"changes the same rows as {one.delta.where}", name)
    return parts


def _is_dense(parts: Sequence[_Part]) -> bool:
    """True if positions and values would be larger than the whole tensor."""
    layout = _whole(parts[0].entry)
    return _coo_size(sum(part.entry.changed for part in parts), layout) > layout.count * layout.dtype.unit


def _coo_size(changed: int, layout: Layout) -> int:
    return _HEAD + changed * (_positions(layout).itemsize + layout.dtype.unit)


def _encode_coo(found: Sequence[tuple[npt.NDArray[Any], Bits]], layout: Layout) -> bytes:
    """The bytes of a coo entry, copied once."""
    width = _positions(layout).itemsize.to_bytes(_HEAD, "little")
    return b"".join([width, *(at.data for at, _ in found), *(units.data for _, units in found)])


def _positions(layout: Layout) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype("<u4" if layout.count <= 1 << 32 else "<u8")


def _whole(entry: Entry) -> Layout:
    return Layout.of(entry.dtype, entry.shape)


# --- few changes: positions and values ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The changes of a block: positions in the whole tensor, new units, and the change of the digest."""

    part: _Part
    positions: npt.NDArray[Any]
    values: Bits
    changed: int
    added: Digest


def _pack_sparse(
    weights: Weights, parts: Mapping[str, Sequence[_Part]], before: State, threads: int | None
) -> list[Packed]:
    def steps() -> Iterator[tuple[_Part, BlockJob]]:
        for part in (part for name in parts for part in parts[name]):
            yield from ((part, job) for job in jobs_of(part.delta, {part.entry.name: part.entry}))

    packed: dict[str, Packed | None] = {}
    results = in_order(lambda step: _find(weights, *step), steps(), threads)
    for name, found in groupby(results, lambda one: one.part.entry.name):
        packed[name] = _pack_found(name, parts[name], list(found), before)
    for name in parts.keys() - packed.keys():  # without a changed block
        packed[name] = _pack_found(name, parts[name], [], before)
    return [one for one in packed.values() if one is not None]


def _find(weights: Weights, part: _Part, job: BlockJob) -> _Found:
    entry, layout = part.entry, part.entry.layout
    bits = covered(weights[entry.name], entry)
    found = decode_job(part.delta, job, bits)
    added = codec.digest_change(bits, found, layout, job.index)
    begin, end = layout.span(job.index)
    new = np.frombuffer(found.values, bits.dtype)
    if found.positions is None:
        at = np.flatnonzero(bits[begin:end] != new)
        new = new[at]
    else:
        at = np.frombuffer(found.positions, "<u4")
    positions = _moved(at, part.first + begin, _positions(_whole(entry)))
    return _Found(part, positions, new, end - begin if entry.fresh else len(at), added)


def _moved(at: npt.NDArray[Any], by: int, dtype: np.dtype[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    """Positions that count from `by` units earlier, in one pass."""
    return at if not by and at.dtype == dtype else np.add(at, dtype.type(by), dtype=dtype, casting="unsafe")


def _pack_found(name: str, parts: Sequence[_Part], found: Sequence[_Found], before: State) -> Packed | None:
    """The entry for a tensor, or None if nothing changes."""
    changed = {id(part): 0 for part in parts}
    tensor = before.tensors[name].digest
    for one in found:
        changed[id(one.part)] += one.changed
        tensor = add_digests(tensor, one.added)
    for part in parts:
        _check_part(part, changed[id(part)], tensor)
    if not sum(len(one.positions) for one in found):
        return None
    state = TensorState(parts[0].entry.dtype, parts[0].entry.shape, tensor)
    return _pack_coo(name, state, [(one.positions, one.values) for one in found])


def _pack_coo(name: str, state: TensorState, found: Sequence[tuple[npt.NDArray[Any], Bits]]) -> Packed:
    """`found` are positions in the whole tensor, and the units there."""
    data = _encode_coo(found, Layout.of(state.dtype, state.shape))
    changed = sum(len(positions) for positions, _ in found)
    entry = Entry(name, state.dtype, state.shape, None, True, False, changed, (len(data),), state.digest)
    return Packed(entry, [data])


def _check_part(part: _Part, changed: int, tensor: Digest) -> None:
    """For some rows only the number of changes is checked: the digest covers the parts of all ranks."""
    whole = part.entry.layout.count == _whole(part.entry).count
    check_tensor(part.delta, part.entry, changed, tensor if whole else part.entry.digest)


# --- many changes: the whole tensor ------------------------------------------------------------------------------


def _pack_dense(old: Tensor, parts: Sequence[_Part], before: State, threads: int | None) -> Packed:
    name = parts[0].entry.name
    new = replace(old, bits=old.bits.copy())
    tensor, counts = before.tensors[name].digest, []
    for part in parts:
        work = partial(_write_part, part, covered(new, part.entry))
        done = list(in_order(work, jobs_of(part.delta, {name: part.entry}), threads))
        tensor = reduce(add_digests, (added for added, _ in done), tensor)
        counts.append(sum(changed for _, changed in done))
    for part, changed in zip(parts, counts, strict=True):
        _check_part(part, changed, tensor)
    return _pack_fresh(name, new, tensor, threads)


def _write_part(part: _Part, bits: Bits, job: BlockJob) -> tuple[Digest, int]:
    found, added = write_block(part.delta, job, bits)
    return added, changed_by(found, bits, part.entry, job.index)


def _pack_fresh(name: str, tensor: Tensor, digest: Digest, threads: int | None) -> Packed:
    layout = Layout.of(tensor.dtype, tensor.shape)
    blocks = range(layout.blocks)
    data = list(in_order(lambda index: codec.encode(None, tensor.bits, layout, index).data, blocks, threads))
    sizes = tuple(map(len, data))
    return Packed(Entry(name, tensor.dtype, tensor.shape, None, False, True, layout.count, sizes, digest), data)


# --- merging -----------------------------------------------------------------------------------------------------


def _merge_tensor(now: Tensor, name: str, patches: Sequence[Delta], state: TensorState) -> Packed:
    """All positions that occur in a patch, with the current units."""
    layout = Layout.of(now.dtype, now.shape)
    entries = [(patch, patch.entries[name]) for patch in patches if name in patch.entries]
    if any(entry.fresh for _, entry in entries):
        return _pack_fresh(name, now, state.digest, threads=1)
    marks: dict[int, list[bytes]] = {}
    for patch, entry in entries:
        for job in jobs_of(patch, {name: entry}):
            if job.patch is not None and job.patch.positions is not None:
                marks.setdefault(job.index, []).append(job.patch.positions)
    found: list[tuple[npt.NDArray[Any], Bits]] = []
    for index, several in sorted(marks.items()):
        begin, end = layout.span(index)
        at = _union(several, end - begin)
        found.append((_moved(at, begin, _positions(layout)), now.bits[begin:end][at]))
    if _coo_size(sum(len(at) for at, _ in found), layout) > now.nbytes:
        return _pack_fresh(name, now, state.digest, threads=1)
    return _pack_coo(name, state, found)


def _union(several: Sequence[bytes], count: int) -> npt.NDArray[np.int64]:
    marked = np.zeros(count, np.bool_)
    for positions in several:
        marked[np.frombuffer(positions, "<u4")] = True
    return np.flatnonzero(marked)
