"""A schema: the names, dtypes and shapes of a set of weights."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire.weights.dtypes import Dtype
from weightwire.weights.tensor import Weights

__all__ = ["Schema", "schema_of_weights"]

Schema = Mapping[str, tuple[Dtype, tuple[int, ...]]]


def schema_of_weights(weights: Weights) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
