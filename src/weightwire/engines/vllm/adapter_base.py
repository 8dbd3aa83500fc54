"""Whether an adapter was made for the model that a server serves.

vLLM itself copies an adapter that is too small into a corner of its buffers, and generates nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from weightwire.weights import ADAPTER_PREFIX, Weights

__all__ = ["base_mismatch"]

_FACTOR = re.compile(rf"{re.escape(ADAPTER_PREFIX)}(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"\.\d+\.")


def base_mismatch(adapter: Weights, base: Weights) -> str:
    """The first weight that does not fit the base model; empty if all fit. Layers of other names are not judged."""
    for name, layer, axis in _factors(adapter):
        shape = adapter[name].shape
        if layer in base:
            size = base[layer].shape
            if len(size) == len(shape) == 2 and shape[1 - axis] != size[1 - axis]:
                return f"{name} has shape {list(shape)}, and {layer} of the base model {list(size)}"
        elif _LAYER.sub(".0.", layer, count=1) in base:
            return f"{name} changes {layer}, which the base model does not have"
    return ""


def _factors(adapter: Weights) -> Iterator[tuple[str, str, int]]:
    """The name of each factor, the base weight that it changes, and its axis of the rank: 0 in A, 1 in B."""
    for name in adapter:
        if found := _FACTOR.fullmatch(name):
            yield name, f"{found[1]}.weight", "AB".index(found[2])
