"""The LoRA adapter of a PEFT model as a module: its live tensors, under the names that PEFT saves.

Never imports PEFT: a caller that passes a PEFT model has imported it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import CheckpointError, EngineError
from weightwire.weights import ADAPTER_CONFIG, adapter_config, adapter_layers, adapter_weights

__all__ = ["AdapterModule", "lora_settings"]

# Settings that change what an adapter computes, but not the names and shapes of its weights.
_SCALE_SETTINGS = (
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)


def lora_settings(config: bytes, where: str) -> dict[str, Any]:
    """The settings in an adapter_config.json. Raises an EngineError if it does not describe a LoRA adapter."""
    try:
        settings = json.loads(config)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise EngineError(f"{where}: is not valid", hint="publish the adapter again, to another URL")
    if settings.get("peft_type") != "LORA":
        raise EngineError(
            f"{where}: describes an adapter of type {settings.get('peft_type')}, and only LoRA can be served",
            hint="publish with merge=True, and serve the whole model",
        )
    return settings


class AdapterModule(torch.nn.Module):  # type: ignore[misc]
    """Shares the tensors of the active adapter with `model`, which generates with them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        owners = {
            id(tensor): (table, name)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        }
        # In tuples, so that nothing of the model becomes a part of this module.
        self._peft_model = (model,)
        self._layers = tuple((layer, list(layer.active_adapters)) for layer in adapter_layers(model))
        self._places = tuple((*owners[id(tensor)], tensor) for _, tensor in self._tensors(model, owners))

    def _tensors(self, model: torch.nn.Module, owners: dict[int, Any]) -> list[tuple[str, torch.Tensor]]:
        try:
            tensors = adapter_weights(model)
        except CheckpointError as problem:
            raise EngineError(problem.message, hint="activate one adapter with set_adapter()") from problem
        for name, tensor in tensors:
            if id(tensor) not in owners:
                raise EngineError(
                    f"tensor {name!r}: cannot be patched in place (PEFT computes it when it saves the adapter)",
                    hint="publish with merge=True, and serve the module without adapters",
                )
            self._add(name, tensor)
        return tensors

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        module: torch.nn.Module = self
        *above, last = name.split(".")
        for part in above:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        if isinstance(tensor, torch.nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)

    def check_config(self, checkpoint: Path) -> None:
        """Raises if the adapter in a checkpoint computes something else with the same weights."""
        path = checkpoint / ADAPTER_CONFIG
        if not path.is_file():
            raise EngineError(
                f"the run is not an adapter: it has no {ADAPTER_CONFIG}", hint="serve the module without adapters"
            )
        ours = lora_settings(adapter_config(self._peft_model[0]) or b"", "the PEFT model")
        theirs = lora_settings(path.read_bytes(), f"{ADAPTER_CONFIG} of the run")
        for key in _SCALE_SETTINGS:
            if (ours.get(key) or None) != (theirs.get(key) or None):
                raise EngineError(
                    f"{key} of the adapter is {ours.get(key)}, but {theirs.get(key)} in the run",
                    hint=f"make the module with the run's {ADAPTER_CONFIG}: PeftConfig.from_pretrained(DIR)",
                )

    def check_live(self) -> None:
        """Raises if the model does not generate with exactly these tensors. Takes well under a millisecond."""
        for layer, active in self._layers:
            if getattr(layer, "merged", False):
                raise EngineError("the adapter is merged into the PEFT model", hint="unmerge it first")
            if layer.disable_adapters or list(layer.active_adapters) != active:
                raise EngineError(
                    "the adapter is not the active one of the PEFT model", hint="make an engine for each adapter"
                )
        for table, name, tensor in self._places:
            if table.get(name) is not tensor:
                raise EngineError("the model's parameters were moved or replaced", hint="make a new engine for it")
