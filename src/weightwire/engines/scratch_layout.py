"""Learns where weights are on a copy of a model's structure, so that the running model is never at risk.

A loader that works with threads escapes what records its copies, and would write into the model. Here it writes into
memory that nobody reads, and its model is refused, because nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from weightwire.engines.recomputed_layer import Recomputation
from weightwire.engines.skeleton import IsPart, StructureCopier
from weightwire.engines.weight_map import Copy, WeightMap, learn, places_of, storage_of, tensors_of
from weightwire.weights import Schema

__all__ = ["ScratchLayout"]


class ScratchLayout:
    """A model whose weights are as its `load_weights` put them. Nothing is computed from them."""

    def __init__(self, model: torch.nn.Module, is_part: IsPart) -> None:
        self._model = model
        self._is_part = is_part

    def learn(self, schema: Schema) -> WeightMap:
        real = {storage_of(one): one for one in tensors_of(self._model).values()}
        # Never written, so it takes no memory. By storage, so that tied weights stay tied.
        scratch = {key: torch.UntypedStorage(one.untyped_storage().nbytes()) for key, one in real.items()}
        places = {storage._cdata: real[key] for key, storage in scratch.items()}

        def in_scratch(tensor: torch.Tensor) -> torch.Tensor:
            storage = scratch.get(storage_of(tensor))
            if storage is None:
                return tensor
            made = torch.empty(0, dtype=tensor.dtype)
            made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            made.__class__ = tensor.__class__
            return made

        form: torch.nn.Module = StructureCopier(self._is_part, in_scratch).copy(self._model)
        found = learn(form, form.load_weights, schema)
        copies = {
            name: tuple(replace(one, target=places[storage_of(one.target)].detach()) for one in several)
            for name, several in found.copies.items()
        }
        return replace(found, copies=copies, places=places_of(self._model))

    def recomputations(self, copies: Iterable[Copy]) -> list[Recomputation]:
        return []

    def is_current(self) -> bool:
        return True
