"""Weights in one stretch of memory, as a trainer has them, so that one memcpy copies them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = dict[str, NDArray[np.uint16]]
Named = dict[str, tuple[str, tuple[int, ...], NDArray[np.uint16]]]


@dataclass(frozen=True)
class FlatWeights:
    """`flat` is all of it, `bits` are views of `flat` by tensor."""

    flat: NDArray[np.uint16]
    bits: Bits

    @property
    def bf16(self) -> Named:
        """The same memory in the words that weightwire takes for dtypes that NumPy has not."""
        return {name: ("BF16", bits.shape, bits) for name, bits in self.bits.items()}


def flat_copy(weights: Mapping[str, NDArray[np.uint16]]) -> FlatWeights:
    """A copy of weights, which may be views of files."""
    flat = np.empty(sum(tensor.size for tensor in weights.values()), np.uint16)
    bits: Bits = {}
    start = 0
    for name, tensor in weights.items():
        bits[name] = flat[start : start + tensor.size].reshape(tensor.shape)
        bits[name][...] = tensor
        start += tensor.size
    return FlatWeights(flat, bits)


def check_same(made: FlatWeights, wanted: FlatWeights, what: str) -> None:
    if not np.array_equal(made.flat, wanted.flat):
        raise SystemExit(f"{what}: the result is not bit for bit the new weights")
