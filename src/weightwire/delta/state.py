"""The state digest: proves that two places hold the same weights, bit for bit.

It detects accidents and drift, not malice. A tensor's digest is a sum, so it can be updated from a delta alone and
added up from shards.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from weightwire import codec
from weightwire.codec import Digest, Digests, uvarint
from weightwire.delta.tensor_stacks import TensorStack, kind_of, stacks_of
from weightwire.system import Progress, in_order
from weightwire.weights import Dtype, read_weights

__all__ = ["State", "TensorState", "add_digests", "digest", "subtract_digests"]

_PREFIX = b"weightwire state 1\n"
_DIGEST = 16  # bytes


def add_digests(a: Digest, b: Digest) -> Digest:
    return (a[0] + b[0]) % 2**64, (a[1] + b[1]) % 2**64


def subtract_digests(a: Digest, b: Digest) -> Digest:
    """The digest that gives `a` when added to `b`."""
    return (a[0] - b[0]) % 2**64, (a[1] - b[1]) % 2**64


@dataclass(frozen=True)
class TensorState:
    """The dtype, shape and digest of a tensor."""

    dtype: Dtype
    shape: tuple[int, ...]
    digest: Digest


def _label(name: str, dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    raw = name.encode()
    return uvarint(len(raw)) + raw + _kind(dtype, shape)


@lru_cache(4096)  # thousands of tensors have a few shapes
def _kind(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    return bytes([dtype.code]) + b"".join(map(uvarint, (len(shape), *shape)))


class State:
    """The digests of a set of weights. `hex` identifies all of them."""

    def __init__(self, tensors: Mapping[str, TensorState]) -> None:
        self.tensors = dict(sorted(tensors.items(), key=lambda item: item[0].encode()))

    @cached_property
    def hex(self) -> str:
        """Computed in one go: there may be 100,000 tensors."""
        words = [word for tensor in self.tensors.values() for word in tensor.digest]
        digests = struct.pack(f"<{len(words)}Q", *words)
        parts: list[bytes] = [_PREFIX]
        for at, (name, tensor) in zip(range(0, len(digests), _DIGEST), self.tensors.items(), strict=True):
            parts += (_label(name, tensor.dtype, tensor.shape), digests[at : at + _DIGEST])
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def replace(self, changed: Mapping[str, TensorState], removed: Iterable[str] = ()) -> State:
        """The state after some tensors were changed, added or removed."""
        gone = set(removed)
        if not gone and changed.keys() <= self.tensors.keys():  # the order stays
            after = State({})
            after.tensors = {**self.tensors, **changed}
            return after
        return State({name: t for name, t in (self.tensors | dict(changed)).items() if name not in gone})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.tensors == other.tensors

    def __hash__(self) -> int:
        return hash(self.hex)

    def __repr__(self) -> str:
        return f"State({len(self.tensors)} tensors, {self.hex[:12]})"


def digest(weights: Any, *, threads: int | None = None, progress: Progress | None = None) -> State:
    """The state of weights, from any source that `diff` accepts. Reads all of them once."""
    read = read_weights(weights)
    tensors = {name: read[name] for name in read}
    sums: dict[str, Digest] = dict.fromkeys(tensors, (0, 0))
    stacks = stacks_of({name: kind_of(tensor) for name, tensor in tensors.items()})
    jobs = [(stack, block) for stack in stacks for block in range(stack.layout.blocks)]

    def work(job: tuple[TensorStack, int]) -> Digests:
        stack, block = job
        return codec.digest(stack.units(tensors, block), stack.layout.alone(block), 0)

    for (stack, block), done in zip(jobs, in_order(work, jobs, threads), strict=True):
        for name, (a, b) in zip(stack.members(block), done.tolist(), strict=True):
            sums[name] = add_digests(sums[name], (a, b))
        if progress:
            progress(stack.nbytes(block))
    return State({name: TensorState(t.dtype, t.shape, sums[name]) for name, t in tensors.items()})
