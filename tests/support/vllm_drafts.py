"""What the draft of an offline vLLM model holds and predicts. These functions run in its worker."""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["draft_weights", "record_predictions", "shared_with_draft", "take_predictions"]


def draft_weights(worker: Any) -> dict[str, str]:
    """The digest of every parameter of the draft, also of those that it shares with the model."""
    import torch

    draft = worker.get_draft_model()
    return {
        name: hashlib.sha256(one.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in draft.named_parameters(remove_duplicate=False)
    }


def shared_with_draft(worker: Any) -> list[str]:
    """The draft's parameters that are the model's."""
    held = {one.data_ptr() for one in worker.get_model().parameters()}
    parameters = worker.get_draft_model().named_parameters(remove_duplicate=False)
    return [name for name, one in parameters if one.data_ptr() in held]


def record_predictions(worker: Any) -> None:
    """Records every token that the draft proposes from now on, until they are taken."""
    drafter = worker.model_runner.drafter
    propose, drafter.predicted = drafter.propose, []

    def recorded(*given: Any, **named: Any) -> Any:
        found = propose(*given, **named)
        drafter.predicted += found.flatten().tolist()
        return found

    drafter.propose = recorded


def take_predictions(worker: Any) -> list[int]:
    drafter = worker.model_runner.drafter
    del drafter.propose  # that of its class again
    return list(drafter.predicted)
