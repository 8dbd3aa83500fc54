"""4 make: two sets of weights -> the delta between them; one set -> an anchor.

Cuts tensors into blocks, has the codec encode them in threads, and packs the result with the state digests. Reads
weights, writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightwire import codec
from weightwire.codec import EncodedBlock, Lanes, Layout
from weightwire.codec.coo import encode_coo
from weightwire.delta import ANCHOR, DELTA, Delta, Entry, Packed, pack
from weightwire.errors import CheckpointError
from weightwire.state import State, TensorState, add
from weightwire.weights import Tensor, Weights, read_weights
from weightwire.workers import in_order

__all__ = ["Progress", "anchor", "diff"]

Progress = Callable[[int], None]
"""Told how many bytes of weights have been dealt with since it was last told."""


def diff(
    old: Any,
    new: Any,
    *,
    before: State | None = None,
    coo: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Delta:
    """The delta that turns `old` into `new`: the smallest exact one, or positions and values if `coo`.

    Each is a safetensors file, a checkpoint directory, or a mapping of names to NumPy arrays, torch tensors,
    `Tensor`s or `(dtype name, shape, buffer)`. `before` is the state of `old` where it is known (from `digest`, or
    `Delta.advance`); else it is computed, which reads all of `old` once more.
    """
    return _Making(read_weights(old), read_weights(new), DELTA, before, coo).run(threads, progress)


def anchor(weights: Any, *, threads: int | None = None, progress: Progress | None = None) -> Delta:
    """All of some weights, in a file that needs no base."""
    return _Making({}, read_weights(weights), ANCHOR, None, False).run(threads, progress)


@dataclass
class _Pair:
    """A tensor before and after (either may be missing), and what has been made of its blocks so far."""

    old: Tensor | None
    new: Tensor | None
    layout: Layout
    base: Lanes = (0, 0)
    lanes: Lanes = (0, 0)
    changed: int = 0
    parts: list[bytes] = field(default_factory=list)
    found: list[tuple[int, Any, Any]] = field(default_factory=list)  # for coo

    @property
    def fresh(self) -> bool:
        """Nothing of the old tensor, if there is one, helps to encode the new one."""
        return self.new is not None and (
            self.old is None
            or (self.old.dtype, self.old.shape, self.old.rows) != (self.new.dtype, self.new.shape, self.new.rows)
        )


@dataclass(frozen=True)
class _Job:
    name: str
    side: str  # "old": digest only; "new": encode without a base; "both": encode
    index: int


@dataclass(frozen=True)
class _Done:
    base: Lanes
    lanes: Lanes
    block: EncodedBlock | None
    found: tuple[int, Any, Any] | None
    nbytes: int


class _Making:
    def __init__(self, old: Weights, new: Weights, kind: str, before: State | None, coo: bool) -> None:
        self.kind, self.before, self.coo = kind, before, coo
        self.pairs = {name: _pair(old.get(name), new.get(name)) for name in {**old, **new}}
        if before is not None:
            _check_known(before, old)
        self.partial = any(t.rows for pair in self.pairs.values() for t in (pair.old, pair.new) if t)

    def run(self, threads: int | None, progress: Progress | None) -> Delta:
        jobs = list(self._jobs())
        for job, done in zip(jobs, in_order(self._work, jobs, threads), strict=True):
            self._gather(self.pairs[job.name], done)
            if progress:
                progress(done.nbytes)
        return self._pack()

    def _jobs(self) -> Iterator[_Job]:
        for name, pair in self.pairs.items():
            if pair.old is not None and (pair.new is None or pair.fresh) and self.before is None:
                old_layout = _layout(pair.old)
                yield from (_Job(name, "old", index) for index in range(old_layout.blocks))
            if pair.new is not None:
                side = "new" if pair.fresh else "both"
                yield from (_Job(name, side, index) for index in range(pair.layout.blocks))

    def _work(self, job: _Job) -> _Done:
        pair = self.pairs[job.name]
        begin, end = pair.layout.span(job.index)
        if job.side == "old":
            assert pair.old is not None
            return _Done(codec.digest(pair.old.bits, _layout(pair.old), job.index), (0, 0), None, None, 0)
        assert pair.new is not None
        nbytes = (end - begin) * pair.layout.dtype.unit
        if job.side == "new":
            block = codec.encode(None, pair.new.bits, pair.layout, job.index)
            return _Done((0, 0), codec.digest(pair.new.bits, pair.layout, job.index), block, None, nbytes)
        assert pair.old is not None
        base = (0, 0) if self.before else codec.digest(pair.old.bits, pair.layout, job.index)
        block = codec.encode(pair.old.bits, pair.new.bits, pair.layout, job.index)
        if not self.coo:
            return _Done(base, block.digest, block, None, nbytes)
        at = np.flatnonzero(pair.old.bits[begin:end] != pair.new.bits[begin:end])
        return _Done(base, block.digest, None, (job.index, at, pair.new.bits[begin:end][at]), nbytes)

    def _gather(self, pair: _Pair, done: _Done) -> None:
        pair.base = add(pair.base, done.base)
        pair.lanes = add(pair.lanes, done.lanes)
        if done.block:
            pair.parts.append(done.block.data)
            pair.changed += done.block.changed
        if done.found and len(done.found[1]):
            pair.found.append(done.found)
            pair.changed += len(done.found[1])

    def _pack(self) -> Delta:
        known = self.before or State(
            {n: TensorState(p.old.dtype, p.old.shape, p.base) for n, p in self.pairs.items() if p.old is not None}
        )
        packed = [
            self._pack_entry(name, pair, known)
            for name, pair in self.pairs.items()
            if pair.new is not None and (pair.fresh or pair.changed)
        ]
        removed = [name for name, pair in self.pairs.items() if pair.new is None]
        after = known.replace({one.entry.name: one.entry.state for one in packed}, removed)
        return pack(
            packed,
            kind=self.kind,
            before="" if self.partial or self.kind == ANCHOR else known.hex,
            after="" if self.partial else after.hex,
            removed=removed,
        )

    def _pack_entry(self, name: str, pair: _Pair, known: State) -> Packed:
        assert pair.new is not None
        lanes = pair.lanes if pair.fresh else add(known.tensors[name].digest, pair.lanes)
        coo = bool(pair.found)
        parts = [encode_coo(pair.found, pair.layout)] if coo else pair.parts
        entry = Entry(
            name=name,
            dtype=pair.new.dtype,
            shape=pair.new.shape,
            rows=pair.new.rows,
            coo=coo,
            fresh=pair.fresh,
            changed=pair.changed,
            blocks=tuple(map(len, parts)),
            digest=lanes,
        )
        return Packed(entry, parts)


def _pair(old: Tensor | None, new: Tensor | None) -> _Pair:
    either = new if new is not None else old
    assert either is not None
    return _Pair(old, new, _layout(either))


def _layout(tensor: Tensor) -> Layout:
    return Layout.of(tensor.dtype, tensor.shape, tensor.rows)


def _check_known(before: State, old: Weights) -> None:
    have = {name: (tensor.dtype, tensor.shape) for name, tensor in old.items()}
    know = {name: (tensor.dtype, tensor.shape) for name, tensor in before.tensors.items()}
    if have != know:
        name = min(name for name in {**have, **know} if have.get(name) != know.get(name))
        raise CheckpointError(
            f"tensor {name!r}: the known state is not that of the old weights",
            hint="pass before=digest(old), or leave it out",
        )
