"""Turns the files of a version into one patch of absolute values, which needs no base and can be applied twice.

Replicas replay it from their journal, and engines without a base apply it. It consists of `coo` entries, and of `fresh`
entries if the whole tensor is smaller than its changes. Digests verify the result before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import Digest, Digests, Layout
from weightwire.delta.decoder import (
    BlockJob,
    MemberCounts,
    changed_by,
    check_state,
    check_tensors,
    decode_job,
    jobs_of,
    units_of,
    write_block,
)
from weightwire.delta.encoded_stack import EncodedStack, Entry
from weightwire.delta.file import Delta, Packed, block_hash, pack
from weightwire.delta.member_sums import MemberSums
from weightwire.delta.state import State, TensorState, add_digests
from weightwire.errors import CorruptDelta, SchemaChanged, WrongBase
from weightwire.system import in_order
from weightwire.weights import Bits, Tensor, Weights, schema_of_weights

__all__ = ["DecodedBlocks", "make_absolute", "merge_absolute", "write_absolute"]

_HEAD = 8  # bytes of a coo entry before its positions

DecodedBlocks = list[BlockJob]
"""The blocks that `make_absolute` decoded: `write_absolute` need not decode them again, and writes stacks at once."""


def make_absolute(
    weights: Weights,
    deltas: Sequence[Delta],
    before: State,
    after: str = "",
    *,
    threads: int | None = None,
    decoded: DecodedBlocks | None = None,
) -> Delta:
    """Combines the files of one version into a patch for weights with state `before`. Writes nothing.

    A version has one file per rank that published it, or none if nothing changed. If `after` is given, the result must
    have that state. Appends to `decoded`.
    """
    for delta in deltas:
        check_tensors(delta, weights, delta.stacks)
        _check_schema(delta, weights)
        check_state(delta, weights, before, threads)
    parts = _by_tensor(deltas)
    dense = {name for name in parts if _is_dense(parts[name])}
    sums = {id(delta): MemberSums(delta) for delta in deltas}
    found = _find_changes(weights, deltas, dense, sums, threads, [] if decoded is None else decoded)
    rewritten = {name: _rewrite(weights[name], parts[name], sums, threads) for name in dense}
    for delta in deltas:
        sums[id(delta)].check(lambda one: before.digests_of(one.names) if _is_whole(one) else None)
    packed = []
    for name, digest in _digests_after(before, deltas, sums).items():
        state = parts[name][0].entry.state(digest)
        if name in rewritten:
            packed.append(_pack_fresh(name, rewritten[name], state.digest, threads))
        elif name in found:
            packed.append(_pack_found(name, weights[name], state, found[name]))
    reached = before.replace({one.stack.first.name: _state_of(one) for one in packed})
    for wanted in {after, *(delta.after for delta in deltas)} - {"", reached.hex}:
        where = deltas[0].where if deltas else "version without files"
        raise CorruptDelta(
            f"{where}: the result has state {reached.hex[:12]}, expected {wanted[:12]}",
            hint="the file is damaged or belongs to another version: fetch it again",
        )
    return pack(packed, before=before.hex, after=reached.hex)


def _is_whole(stack: EncodedStack) -> bool:
    """Whether it covers all rows of its tensors."""
    return stack.first.layout.count == _whole(stack.first).count


def _digests_after(before: State, deltas: Sequence[Delta], sums: Mapping[int, MemberSums]) -> dict[str, Digest]:
    """The digests of all tensors that have an entry. Several deltas may change rows of one."""
    after, every = before, dict[str, None]()
    for delta in deltas:
        names = [name for stack in delta.stacks for name in stack.names]
        added = [np.zeros((0, 2), np.uint64), *(sums[id(delta)].added(stack) for stack in delta.stacks)]
        after = after.with_digests(names, after.digests_of(names) + np.concatenate(added))
        every |= dict.fromkeys(names)
    return {name: (a, b) for name, (a, b) in zip(every, after.digests_of(every).tolist(), strict=True)}


def _state_of(packed: Packed) -> TensorState:
    entry = packed.stack.first
    assert entry.digest is not None
    return entry.state(entry.digest)


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


def write_absolute(
    weights: Weights, patch: Delta, *, threads: int | None = None, decoded: Sequence[BlockJob] = ()
) -> dict[str, Digest]:
    """Writes a patch into whole weights. Returns the change of each tensor's digest.

    `decoded` are blocks of this patch. They hold the old units afterwards.
    """
    check_tensors(patch, weights, patch.stacks)
    _check_schema(patch, weights)
    for stack in patch.stacks:
        if stack.first.rows or len(stack.entries) > 1 or not (stack.coo or stack.fresh):
            patch.corrupt("does not hold absolute values", stack.first.name)

    def work(step: tuple[EncodedStack, range | None]) -> tuple[str, Digest]:
        stack, only = step
        sums = (write_block(patch, job, units_of(weights, job))[1].sum(0) for job in jobs_of(patch, [stack], only))
        a, b = sum(sums, np.zeros(2, np.uint64)).tolist()
        return stack.first.name, (a, b)

    added = dict.fromkeys(patch.entries, (0, 0))
    done: set[str] = set()
    changes = in_order(lambda job: write_block(patch, job, units_of(weights, job))[1], decoded, threads)
    for job, several in zip(decoded, changes, strict=True):
        for entry, (a, b) in zip(job.members, several.tolist(), strict=True):
            done.add(entry.name)
            if a or b:
                added[entry.name] = add_digests(added[entry.name], (a, b))
    left = [stack for stack in patch.stacks if stack.first.name not in done]
    for name, change in in_order(work, _steps(left), threads):
        added[name] = add_digests(added[name], change)
    return added


def _steps(stacks: Iterable[EncodedStack]) -> Iterator[tuple[EncodedStack, range | None]]:
    """Work items for threads: a whole coo tensor (splitting it costs half of the work), or one block."""
    for stack in stacks:
        yield from [(stack, None)] if stack.coo else ((stack, range(i, i + 1)) for i in range(len(stack.blocks)))


# --- parts of a tensor -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The entry of one file for a tensor, or for some of its rows."""

    delta: Delta
    entry: Entry

    @property
    def first(self) -> int:
        """The first unit that it covers, counted from the start of the tensor."""
        return _first_unit(self.entry)

    @property
    def stack(self) -> EncodedStack:
        return self.delta.stack_of[self.entry.name]


def _first_unit(entry: Entry) -> int:
    return entry.rows[0] * entry.layout.row if entry.rows else 0


def _check_schema(delta: Delta, weights: Weights) -> None:
    """Checks that no tensor is added, removed or reshaped."""
    held = schema_of_weights(weights)
    other = [name for stack in delta.stacks for name in stack.names if held.get(name) != stack.kind]
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
    """True if positions and values would be larger than a large tensor. Those of stacks are small, and listed first."""
    layout = _whole(parts[0].entry)
    if len(parts[0].stack.entries) > 1:
        return False
    return _coo_size(sum(part.entry.changed for part in parts), layout) > layout.count * layout.dtype.unit


def _coo_size(changed: int, layout: Layout) -> int:
    return _HEAD + changed * (_positions(layout).itemsize + layout.dtype.unit)


def _encode_coo(found: Sequence[tuple[npt.NDArray[Any], Bits]], layout: Layout) -> bytes:
    """The bytes of a coo entry, copied once."""
    width = _positions(layout).itemsize.to_bytes(_HEAD, "little")
    return b"".join([width, *(at.data for at, _ in found), *(units.data for _, units in found)])


def _moved(at: npt.NDArray[Any], by: int, dtype: np.dtype[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    """Positions that count from `by` units earlier, in one pass."""
    return at if not by and at.dtype == dtype else np.add(at, dtype.type(by), dtype=dtype, casting="unsafe")


def _positions(layout: Layout) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype("<u4" if layout.count <= 1 << 32 else "<u8")


def _whole(entry: Entry) -> Layout:
    return Layout.of(entry.dtype, entry.shape)


# --- few changes: positions and values ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The changes of a member of a block: positions in the whole tensor, and new units."""

    name: str
    positions: npt.NDArray[Any]
    values: Bits


@dataclass(frozen=True)
class _FoundBlock:
    delta: Delta
    job: BlockJob
    found: list[_Found]
    added: Digests
    changed: MemberCounts


def _find_changes(
    weights: Weights,
    deltas: Sequence[Delta],
    dense: set[str],
    sums: Mapping[int, MemberSums],
    threads: int | None,
    decoded: DecodedBlocks,
) -> dict[str, list[_Found]]:
    """The changes of all tensors that are not dense, by name."""

    def steps() -> Iterator[tuple[Delta, BlockJob]]:
        for delta in deltas:
            stacks = [stack for stack in delta.stacks if stack.first.name not in dense]
            yield from ((delta, job) for job in jobs_of(delta, stacks))

    changes: dict[str, list[_Found]] = {}
    for block in in_order(lambda step: _find(weights, *step), steps(), threads):
        sums[id(block.delta)].add(block.job, block.added, block.changed)
        decoded.append(block.job)
        for one in block.found:
            changes.setdefault(one.name, []).append(one)
    return changes


def _find(weights: Weights, delta: Delta, job: BlockJob) -> _FoundBlock:
    units, layout = units_of(weights, job), job.stack.layout.alone(job.index)
    patch = decode_job(delta, job, units)
    added = codec.digest_change(units, patch, layout, 0)
    members = units if isinstance(units, tuple) else (units,)
    new = np.frombuffer(patch.values, members[0].dtype)
    if patch.positions is None:
        each = new.reshape(len(members), -1)
        places = [np.flatnonzero(a != b) for a, b in zip(members, each, strict=True)]
        values = [b[at] for b, at in zip(each, places, strict=True)]
    else:
        at = np.frombuffer(patch.positions, "<u4")
        bounds = np.searchsorted(at, np.arange(1, len(members)) * layout.segment)
        places = [part - k * layout.segment for k, part in enumerate(np.split(at, bounds))]
        values = np.split(new, bounds)
    changed = np.full(len(members), len(members[0])) if job.stack.fresh else np.array([len(at) for at in places])
    begin = job.stack.layout.span(job.index)[0] if len(job.stack.entries) == 1 else 0
    found = []
    for entry, where, what in zip(job.members, places, values, strict=True):
        if len(where):
            first = _first_unit(entry) + begin
            found.append(_Found(entry.name, _moved(where, first, _positions(_whole(entry))), what))
    return _FoundBlock(delta, replace(job, patch=patch), found, added, changed)


def _pack_found(name: str, old: Tensor, state: TensorState, found: Sequence[_Found]) -> Packed:
    """A list of changes, or the whole tensor if that is smaller."""
    ordered = sorted(found, key=lambda one: int(one.positions[0]))
    layout = Layout.of(state.dtype, state.shape)
    if _coo_size(sum(len(one.positions) for one in ordered), layout) <= old.nbytes:
        return _pack_coo(name, state, [(one.positions, one.values) for one in ordered])
    bits = old.bits.copy()
    for one in ordered:
        bits[one.positions] = one.values
    return _pack_fresh(name, replace(old, bits=bits), state.digest, threads=1)


def _pack_coo(name: str, state: TensorState, found: Sequence[tuple[npt.NDArray[Any], Bits]]) -> Packed:
    """`found` are positions in the whole tensor, and the units there."""
    data = _encode_coo(found, Layout.of(state.dtype, state.shape))
    changed = sum(len(positions) for positions, _ in found)
    entry = Entry(name, state.dtype, state.shape, None, True, False, changed, state.digest)
    return Packed(EncodedStack((entry,), 1, (len(data),), (block_hash(data),)), [data])


# --- many changes: the whole tensor ------------------------------------------------------------------------------


def _rewrite(old: Tensor, parts: Sequence[_Part], sums: Mapping[int, MemberSums], threads: int | None) -> Tensor:
    """A copy of the tensor with all changes."""
    new = replace(old, bits=old.bits.copy())
    for part in parts:
        jobs = list(jobs_of(part.delta, [part.stack]))
        work = partial(_write_part, part.delta, {part.entry.name: new})
        for job, (added, changed) in zip(jobs, in_order(work, jobs, threads), strict=True):
            sums[id(part.delta)].add(job, added, changed)
    return new


def _write_part(delta: Delta, weights: Weights, job: BlockJob) -> tuple[Digests, MemberCounts]:
    units = units_of(weights, job)
    found, added = write_block(delta, job, units)
    return added, changed_by(found, units, job)


def _pack_fresh(name: str, tensor: Tensor, digest: Digest, threads: int | None) -> Packed:
    layout = Layout.of(tensor.dtype, tensor.shape)

    def encode(index: int) -> bytes:
        begin, end = layout.span(index)
        return codec.encode(None, tensor.bits[begin:end], layout.alone(index), 0).data

    data = list(in_order(encode, range(layout.blocks), threads))
    entry = Entry(name, tensor.dtype, tensor.shape, None, False, True, layout.count, digest)
    return Packed(EncodedStack((entry,), 1, tuple(map(len, data)), tuple(map(block_hash, data))), data)


# --- merging -----------------------------------------------------------------------------------------------------


def _merge_tensor(now: Tensor, name: str, patches: Sequence[Delta], state: TensorState) -> Packed:
    """All positions that occur in a patch, with the current units."""
    layout = Layout.of(now.dtype, now.shape)
    entries = [(patch, patch.entries[name]) for patch in patches if name in patch.entries]
    if any(entry.fresh for _, entry in entries):
        return _pack_fresh(name, now, state.digest, threads=1)
    marks: dict[int, list[bytes]] = {}
    for patch, _ in entries:
        for job in jobs_of(patch, [patch.stack_of[name]]):
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
