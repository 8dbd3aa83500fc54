"""The state digest: proves that two places hold the same weights, bit for bit.

It detects accidents and drift, not malice. A tensor's digest is a sum, so it can be updated from a delta alone and
added up from shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire import codec
from weightwire.codec import Digest, Digests, uvarint
from weightwire.delta.tensor_stacks import TensorStack, stacks_in
from weightwire.system import Progress, in_order
from weightwire.weights import Dtype, HeldWeights, read_weights, schema_of_weights

__all__ = ["State", "TensorState", "add_digests", "digest", "subtract_digests"]

DtypeShape = tuple[Dtype, tuple[int, ...]]

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


@lru_cache(4096)  # thousands of tensors have a few shapes
def _kind(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    return bytes([dtype.code]) + b"".join(map(uvarint, (len(shape), *shape)))


@dataclass(frozen=True, eq=False)
class _Roster:
    """What all states of a run share: the names in the order of a state, and the dtypes and shapes by name."""

    names: tuple[str, ...]
    kinds: Mapping[str, DtypeShape]

    @cached_property
    def place(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def places(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        place = self.place
        return np.array([place[name] for name in names], np.int64)

    @cached_property
    def form(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes that a state digest is the hash of, with zeros as digests, and where the digests begin."""
        raw, room = [name.encode() for name in self.names], bytes(_DIGEST)
        labels = [uvarint(len(one)) + one + _kind(*self.kinds[name]) for name, one in zip(self.names, raw, strict=True)]
        ends = np.cumsum([len(label) + _DIGEST for label in labels], dtype=np.int64) + len(_PREFIX)
        text = b"".join([_PREFIX, *(part for label in labels for part in (label, room))])
        return np.frombuffer(text, np.uint8), ends - _DIGEST


@dataclass(frozen=True, eq=False)
class _Tensors(Mapping[str, TensorState]):
    roster: _Roster
    digests: Digests

    def __getitem__(self, name: str) -> TensorState:
        a, b = self.digests[self.roster.place[name]].tolist()
        return TensorState(*self.roster.kinds[name], (a, b))

    def __iter__(self) -> Iterator[str]:
        return iter(self.roster.names)

    def __len__(self) -> int:
        return len(self.roster.names)


class State:
    """The digests of a set of weights. `hex` identifies all of them.

    Digests are rows of one array, because there may be 100,000 tensors.
    """

    def __init__(self, tensors: Mapping[str, TensorState]) -> None:
        names = tuple(sorted(tensors, key=str.encode))
        roster = _Roster(names, {name: (tensors[name].dtype, tensors[name].shape) for name in names})
        self._hold(roster, _rows([tensors[name].digest for name in names]))

    def _hold(self, roster: _Roster, digests: Digests) -> None:
        digests.flags.writeable = False  # the property `digests` shows them, and `hex` is computed once
        self._roster, self._digests = roster, digests

    @classmethod
    def of(cls, kinds: Mapping[str, DtypeShape], names: Iterable[str], digests: Digests) -> State:
        """The state of tensors of these kinds. `names` says whose digests they are."""
        roster = _Roster(tuple(sorted(kinds, key=str.encode)), kinds)
        every = np.zeros((len(kinds), 2), np.uint64)
        every[roster.places(names)] = digests
        state = cls.__new__(cls)
        state._hold(roster, every)
        return state

    @property
    def tensors(self) -> Mapping[str, TensorState]:
        """By name, in the order of the UTF-8 bytes of the names."""
        return _Tensors(self._roster, self._digests)

    @property
    def kinds(self) -> Mapping[str, DtypeShape]:
        """The dtypes and shapes by name."""
        return self._roster.kinds

    @property
    def digests(self) -> Digests:
        """Those of all tensors, in the order of the UTF-8 bytes of their names."""
        return self._digests

    def digests_of(self, names: Iterable[str]) -> Digests:
        """The digests of some tensors, in this order."""
        return self._digests[self._roster.places(names)]

    @cached_property
    def hex(self) -> str:
        """Computed in one go: there may be 100,000 tensors."""
        form, starts = self._roster.form
        text = form.copy()
        text[starts[:, None] + np.arange(_DIGEST)] = self._digests.astype("<u8").view(np.uint8).reshape(-1, _DIGEST)
        return hashlib.sha256(text.data).hexdigest()

    def with_digests(self, names: Iterable[str], digests: Digests) -> State:
        """The state after some tensors were changed."""
        every = self._digests.copy()
        every[self._roster.places(names)] = digests
        after = State.__new__(State)
        after._hold(self._roster, every)
        return after

    def after(self, changed: Sequence[tuple[Sequence[str], DtypeShape, Digests]], removed: Iterable[str] = ()) -> State:
        """Like `replace`, for many tensors: names of one kind, and a row of `digests` for each."""
        names, gone = [name for several, _, _ in changed for name in several], set(removed)
        digests = np.concatenate([np.zeros((0, 2), np.uint64), *(rows for _, _, rows in changed)])
        held = self.kinds
        if not gone and all(held.get(name) == kind for several, kind, _ in changed for name in several):
            return self.with_digests(names, digests)
        kinds = {**self.kinds, **{name: kind for several, kind, _ in changed for name in several}}
        kept = {name: kind for name, kind in kinds.items() if name not in gone}
        same = [name for name in self._roster.names if name in kept]
        return State.of(kept, same, self.digests_of(same)).with_digests(names, digests)

    def replace(self, changed: Mapping[str, TensorState], removed: Iterable[str] = ()) -> State:
        """The state after some tensors were changed, added or removed."""
        gone = set(removed)
        if not gone and all(self.kinds.get(name) == (one.dtype, one.shape) for name, one in changed.items()):
            return self.with_digests(changed, _rows([one.digest for one in changed.values()]))
        return State({name: t for name, t in (dict(self.tensors) | dict(changed)).items() if name not in gone})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return False
        return self.kinds == other.kinds and np.array_equal(self._digests, other._digests)

    def __hash__(self) -> int:
        return hash(self.hex)

    def __repr__(self) -> str:
        return f"State({len(self.kinds)} tensors, {self.hex[:12]})"


def _rows(digests: list[Digest]) -> Digests:
    return np.array(digests, np.uint64).reshape(-1, 2)


def digest(weights: Any, *, threads: int | None = None, progress: Progress | None = None) -> State:
    """The state of weights, from any source that `diff` accepts. Reads all of them once."""
    read = read_weights(weights)
    tensors = read if isinstance(read, HeldWeights) else {**read}
    stacks = list(stacks_in(tensors))
    jobs = [(stack, block) for stack in stacks for block in range(stack.layout.blocks)]
    sums = {stack.names[0]: np.zeros((len(stack.names), 2), np.uint64) for stack in stacks}

    def work(job: tuple[TensorStack, int]) -> Digests:
        stack, block = job
        return codec.digest(stack.units(tensors, block), stack.layout.alone(block), 0)

    for (stack, block), done in zip(jobs, in_order(work, jobs, threads), strict=True):
        sums[stack.names[0]][stack.place(block)] += done
        if progress:
            progress(stack.nbytes(block))
    names = [name for stack in stacks for name in stack.names]
    every = np.concatenate([np.zeros((0, 2), np.uint64), *sums.values()])
    return State.of(schema_of_weights(tensors), names, every)
