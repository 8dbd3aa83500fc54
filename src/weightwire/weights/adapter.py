"""The adapter of a PEFT model, with the names and the config that PEFT saves.

Never imports PEFT: a caller that passes a PEFT model has imported it.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any
from weakref import WeakKeyDictionary

from weightwire.errors import CheckpointError
from weightwire.weights.file_names import ADAPTER_PREFIX
from weightwire.weights.peft import has_adapters

__all__ = ["adapter_config", "adapter_weights"]

# Whether PEFT saves the embeddings with an adapter. It may ask the Hub for that, so it decides once for each model.
_SAVES_EMBEDDINGS: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def adapter_weights(model: Any) -> list[tuple[str, Any]]:
    """The names and tensors that PEFT would save for the active adapter."""
    holder, adapter = _find(model)
    weights = holder.state_dict(keep_vars=True)

    def select(embeddings: bool | str) -> dict[str, Any]:
        save: Any = sys.modules["peft"].get_peft_model_state_dict
        return dict(save(holder, weights, adapter_name=adapter, save_embedding_layers=embeddings))

    if holder not in _SAVES_EMBEDDINGS:
        _SAVES_EMBEDDINGS[holder] = select("auto").keys() != select(False).keys()
    # Adapters that transformers has put into a model get the prefix only when they are saved.
    return [
        (name if name.startswith(ADAPTER_PREFIX) else ADAPTER_PREFIX + name, value)
        for name, value in select(_SAVES_EMBEDDINGS[holder]).items()
    ]


def adapter_config(model: Any) -> bytes | None:
    """adapter_config.json of the active adapter; None if this is not a module with adapters.

    The same settings always give the same bytes.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module) or not has_adapters(model):
        return None
    holder, adapter = _find(model)
    base = holder.get_base_model() if hasattr(holder, "get_base_model") else holder
    config = copy.copy(holder.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    settings = config.to_dict()
    if config.task_type is None:  # PEFT needs the class to load such an adapter by itself
        settings["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return (json.dumps(ordered, indent=2, sort_keys=True) + "\n").encode()


def _find(model: Any) -> tuple[Any, str]:
    """The module that holds the adapters, inside all wrappers, and the name of the active adapter."""
    holder = next((one for one in model.modules() if _has_own_config(one)), None)
    if holder is None:
        raise CheckpointError(
            "this model has adapter layers, but no PEFT config", hint="make it with get_peft_model() or add_adapter()"
        )
    active = _active(holder)
    if len(active) != 1:
        raise CheckpointError(
            f"this model has {len(active)} active adapters ({', '.join(active)})",
            hint="activate one with set_adapter(), and publish each adapter to a separate URL",
        )
    return holder, active[0]


def _has_own_config(module: Any) -> bool:
    # Wrappers such as torch.compile's also answer for the module inside them.
    is_own = "peft_config" in vars(module) or hasattr(type(module), "peft_config")
    return is_own and isinstance(module.peft_config, dict)


def _active(holder: Any) -> list[str]:
    active = getattr(holder, "active_adapters", None)
    if callable(active):  # transformers
        try:
            active = active()
        except ValueError:  # PEFT has put the adapters into a transformers model without telling it
            active = None
    return list(active or holder.peft_config)
