"""The layout of a draft, alone or together with the model, if both are in one checkpoint.

In one checkpoint, a patch writes both in one swap, or neither. vLLM loads the layers for multi-token prediction (MTP)
as a second model, and then makes it share the embeddings and the output layer of the first. Shared weights are the
model's: they are written once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Self

import torch

from weightwire.engines.recomputed_layer import Recomputation
from weightwire.engines.relaid_model import RelaidModel
from weightwire.engines.vllm.packing import relaid_out
from weightwire.engines.vllm.post_load import relaid_model_of, shared_model_of
from weightwire.engines.weight_map import Copy, WeightMap, places_of, storage_of, tensors_of
from weightwire.errors import EngineError
from weightwire.weights import Schema

__all__ = ["DraftLayout", "ModelWithDraft", "with_draft"]

_log = logging.getLogger("vllm.weightwire")


class DraftLayout:
    """The layout of a draft, without the weights that it shares with the model."""

    def __init__(self, model: torch.nn.Module, draft_layout: RelaidModel) -> None:
        self._model = model
        self._layout = draft_layout

    @classmethod
    def of(cls, model: torch.nn.Module, draft: torch.nn.Module | None) -> Self | str:
        """Or the reason why the draft cannot be patched."""
        if draft is None:
            return "vLLM loaded it in a way that cannot be observed"
        layout = shared_model_of(draft)
        if isinstance(layout, str) or layout.problem:
            return layout if isinstance(layout, str) else layout.problem
        if layout.computes(storages_of(model)):
            return "vLLM computes weights that it shares with the model"
        return relaid_out(draft) or cls(model, layout)

    def learn(self, schema: Schema) -> WeightMap:
        borrowed = storages_of(self._model)
        found = self._layout.learn(schema, borrowed)
        own = {
            name: tuple(copy for copy in several if storage_of(copy.target) not in borrowed)
            for name, several in found.copies.items()
        }
        return replace(found, copies={name: several for name, several in own.items() if several})

    def recomputations(self, copies: Iterable[Copy]) -> list[Recomputation]:
        return self._layout.recomputations(copies)

    def is_current(self) -> bool:
        return self._layout.is_current()


class ModelWithDraft:
    """The layout of both. `module` holds their weights."""

    def __init__(
        self, model: torch.nn.Module, layout: RelaidModel, draft: torch.nn.Module, draft_layout: DraftLayout
    ) -> None:
        self.module = torch.nn.ModuleList([model, draft])
        self._layout = layout
        self._draft_layout = draft_layout

    def learn(self, schema: Schema) -> WeightMap:
        """Where each tensor of a checkpoint is in the model and in its draft. Changes nothing."""
        found = replace(self._layout.learn(schema), places=places_of(self.module))
        draft = self._learn_draft(schema)
        if draft.unpatchable:
            name, why = next(iter(draft.unpatchable.items()))
            _log.warning("weightwire: the draft is not updated: tensor %r cannot be patched there (%s)", name, why)
            return found

        copies = dict(found.copies)
        for name, several in draft.copies.items():
            copies[name] = (*copies.get(name, ()), *several)
        return replace(found, copies=copies, unused=found.unused - copies.keys())

    def _learn_draft(self, schema: Schema) -> WeightMap:
        try:
            return self._draft_layout.learn(schema)
        except EngineError as problem:
            raise EngineError(
                f"the run does not fit the MTP layers that vLLM predicts with: {problem.message}",
                hint="publish the run with its MTP layers, or serve it without --speculative-config",
            ) from problem

    def recomputations(self, copies: Iterable[Copy]) -> list[Recomputation]:
        """The layers of both that must be computed again after these copies were written."""
        written = list(copies)
        return [*self._layout.recomputations(written), *self._draft_layout.recomputations(written)]

    def is_current(self) -> bool:
        """Whether all computed layers match the loaded weights."""
        return self._layout.is_current() and self._draft_layout.is_current()


def with_draft(model: torch.nn.Module, draft: torch.nn.Module | None) -> ModelWithDraft | str:
    """The layout of a model and its draft, or the reason why the draft cannot be patched."""
    layout, draft_layout = relaid_model_of(model), DraftLayout.of(model, draft)
    if draft is None or isinstance(draft_layout, str):
        return str(draft_layout)
    if isinstance(layout, str) or layout.problem:
        return layout if isinstance(layout, str) else layout.problem
    return ModelWithDraft(model, layout, draft, draft_layout)


def storages_of(model: torch.nn.Module) -> frozenset[int]:
    return frozenset(storage_of(one) for one in tensors_of(model).values())
