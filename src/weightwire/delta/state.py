"""The state digest: proves that two places hold the same weights, bit for bit.

It detects accidents and drift, not malice. A tensor's digest is a sum, so it can be updated from a delta alone and
added up from shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weightwire import codec
from weightwire.codec import Digest, Layout, uvarint
from weightwire.system import Progress, in_order
from weightwire.weights import Dtype, read_weights

__all__ = ["State", "TensorState", "add_digests", "digest", "subtract_digests"]

_PREFIX = b"weightwire state 1\n"


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

    def to_bytes(self) -> bytes:
        dims = b"".join(map(uvarint, (len(self.shape), *self.shape)))
        return bytes([self.dtype.code]) + dims + b"".join(one.to_bytes(8, "little") for one in self.digest)


class State:
    """The digests of a set of weights. `hex` identifies all of them."""

    def __init__(self, tensors: Mapping[str, TensorState]) -> None:
        self.tensors = dict(sorted(tensors.items(), key=lambda item: item[0].encode()))

    @property
    def hex(self) -> str:
        whole = hashlib.sha256(_PREFIX)
        for name, tensor in self.tensors.items():
            raw = name.encode()
            whole.update(uvarint(len(raw)) + raw + tensor.to_bytes())
        return whole.hexdigest()

    def replace(self, changed: Mapping[str, TensorState], removed: Iterable[str] = ()) -> State:
        """The state after some tensors were changed, added or removed."""
        gone = set(removed)
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
    layouts = {name: Layout.of(t.dtype, t.shape, t.rows) for name, t in tensors.items()}
    jobs = [(name, index) for name, layout in layouts.items() for index in range(layout.blocks)]
    sums: dict[str, Digest] = dict.fromkeys(tensors, (0, 0))

    def work(job: tuple[str, int]) -> Digest:
        name, index = job
        return codec.digest(tensors[name].bits, layouts[name], index)

    for (name, index), block in zip(jobs, in_order(work, jobs, threads), strict=True):
        sums[name] = add_digests(sums[name], block)
        if progress:
            begin, end = layouts[name].span(index)
            progress((end - begin) * layouts[name].dtype.unit)
    return State({name: TensorState(t.dtype, t.shape, sums[name]) for name, t in tensors.items()})
