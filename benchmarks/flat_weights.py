"""Weights in one contiguous array, so that one memcpy copies them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = dict[str, NDArray[np.uint16]]
Named = dict[str, tuple[str, tuple[int, ...], NDArray[np.uint16]]]


@dataclass(frozen=True)
class FlatWeights:
    """`flat` holds all weights. `bits` has a view of `flat` for each tensor."""

    flat: NDArray[np.uint16]
    bits: Bits

    @property
    def bf16(self) -> Named:
        """The same memory as `(dtype, shape, buffer)`, which weightwire takes for dtypes that NumPy lacks."""
        return {name: ("BF16", bits.shape, bits) for name, bits in self.bits.items()}


def flat_copy(weights: Mapping[str, NDArray[np.uint16]]) -> FlatWeights:
    """Copies weights, which may be views of files."""
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
        raise SystemExit(f"{what}: the result differs from the new weights")
