"""The adapter of a PEFT model as a module: its live tensors, under the names that PEFT saves.

Never imports PEFT: a caller that passes a PEFT model has imported it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from weightwire.errors import EngineError
from weightwire.weights import ADAPTER_CONFIG, adapter_config, adapter_weights

__all__ = ["AdapterModule"]

# Settings that change what an adapter computes, and leave the shapes of its weights alone.
_COMPUTING = ("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")


class AdapterModule(torch.nn.Module):  # type: ignore[misc]
    """Shares the tensors of the active adapter with `model`, which generates with them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._peft_model = (model,)  # in a tuple, so that it is not a part of this module
        own = {id(one) for one in (*model.parameters(), *model.buffers())}
        for name, tensor in adapter_weights(model):
            if id(tensor) not in own:
                raise EngineError(
                    f"tensor {name!r}: cannot be patched in place (PEFT computes it when it saves the adapter)",
                    hint="publish with merge=True, and serve the module without adapters",
                )
            self._add(name, tensor)

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

    def check(self, checkpoint: Path) -> None:
        """Raises if the adapter in a checkpoint computes something else with the same weights."""
        try:
            theirs: Any = json.loads((checkpoint / ADAPTER_CONFIG).read_bytes())
        except FileNotFoundError:
            raise EngineError(
                f"the run is not an adapter: it has no {ADAPTER_CONFIG}", hint="serve the module without adapters"
            ) from None
        ours = json.loads(adapter_config(self._peft_model[0]) or b"{}")
        for key in _COMPUTING:
            if (ours.get(key) or None) != (theirs.get(key) or None):
                raise EngineError(
                    f"{key} of the adapter is {ours.get(key)}, but {theirs.get(key)} in the run",
                    hint=f"make the module with the run's {ADAPTER_CONFIG}: PeftConfig.from_pretrained(DIR)",
                )

    def check_unmerged(self) -> None:
        """Raises if changes of the adapter would have no effect, because it was merged into the base model."""
        for name, module in self._peft_model[0].named_modules():
            if getattr(module, "merged", False) is True:
                raise EngineError(f"{name}: the adapter is merged", hint="unmerge it: model.unmerge_adapter()")
