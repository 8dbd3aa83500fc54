"""Which tensors are encoded together: those of the same dtype and shape, as one tensor with one more dimension.

Thousands of small tensors then cost no more than a few large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from weightwire.codec import BLOCK, BlockUnits, Layout
from weightwire.weights import Bits, Dtype, HeldWeights, Rows, Tensor, Weights

__all__ = ["TensorKind", "TensorStack", "kind_of", "kinds_in", "stacks_in", "stacks_of"]

TensorKind = tuple[Dtype, tuple[int, ...], Rows | None]


def kind_of(tensor: Tensor) -> TensorKind:
    return tensor.dtype, tensor.shape, tensor.rows


def kinds_in(weights: Weights) -> dict[str, TensorKind]:
    """The kinds of all tensors, by name."""
    if isinstance(weights, HeldWeights):
        return weights.kinds
    return {name: (tensor.dtype, tensor.shape, tensor.rows) for name, tensor in weights.items()}


@dataclass(frozen=True)
class TensorStack:
    """Tensors of one kind, in the order of their names, most often one.

    A block covers `per` of them, or a part of one.
    """

    names: tuple[str, ...]
    kind: TensorKind
    per: int = 1

    @cached_property
    def layout(self) -> Layout:
        dtype, shape, rows = self.kind
        if self.is_single:
            return Layout.of(dtype, shape, rows)
        return Layout.stack(dtype, shape, len(self.names), self.per)

    @property
    def is_single(self) -> bool:
        return len(self.names) == 1

    def place(self, block: int) -> slice:
        """The members that a block covers, by number."""
        return slice(0, 1) if self.is_single else slice(block * self.per, (block + 1) * self.per)

    def members(self, block: int) -> tuple[str, ...]:
        return self.names[self.place(block)]

    def units(self, weights: Weights, block: int) -> BlockUnits:
        """The units that a block covers. One array if these weights hold the stack so."""
        if not self.is_single:
            if isinstance(weights, HoldsStacks) and (units := weights.units_of(self, block)) is not None:
                return units
            return tuple(weights[name].bits for name in self.members(block))
        begin, end = self.layout.span(block)
        return weights[self.names[0]].bits[begin:end]

    def nbytes(self, block: int) -> int:
        begin, end = self.layout.span(block)
        return (end - begin) * self.layout.dtype.unit


@runtime_checkable
class HoldsStacks(Protocol):
    """Weights in which the members of a stack lie next to each other."""

    @property
    def stacks(self) -> Sequence[TensorStack]:
        """All tensors, as `stacks_of` gives them."""
        ...

    def units_of(self, stack: TensorStack, block: int) -> Bits | None:
        """The units that a block of a stack of these tensors covers. None if they do not lie next to each other."""
        ...


def stacks_in(weights: Weights) -> Sequence[TensorStack]:
    """All tensors in stacks: see `stacks_of`."""
    return weights.stacks if isinstance(weights, HoldsStacks) else tuple(stacks_of(kinds_in(weights)))


def stacks_of(kinds: Mapping[str, TensorKind]) -> Iterator[TensorStack]:
    """All tensors in stacks, which are in the order of their first names.

    Tensors larger than a block, empty tensors and ranges of rows are alone.
    """
    groups: dict[object, list[str]] = {}
    alone = {kind for kind in {*kinds.values()} if kind[2] is not None or not 0 < Layout.of(*kind).count <= BLOCK}
    for name in sorted(kinds, key=str.encode):
        kind = kinds[name]
        key = name if kind in alone else kind
        if key in groups:
            groups[key].append(name)
        else:
            groups[key] = [name]
    for names in groups.values():
        kind = kinds[names[0]]
        yield TensorStack(tuple(names), kind, 1 if len(names) == 1 else _members_per_block(len(names), kind))


def _members_per_block(members: int, kind: TensorKind) -> int:
    """Spreads members evenly over blocks, as the parts of a large tensor are."""
    dtype, shape, _ = kind
    blocks = -(-members // (BLOCK // Layout.of(dtype, shape).count))
    return -(-members // blocks)
