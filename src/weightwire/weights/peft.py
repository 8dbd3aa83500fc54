"""PEFT models: detects adapters and merges them into the weights.

Never imports PEFT. The model is not changed: each layer is merged in a copy.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from weightwire.errors import CheckpointError
from weightwire.weights.file_names import ADAPTER_PREFIX

__all__ = ["adapter_layers", "has_adapters", "merged", "names_of_adapters"]

_MARKS = (".base_layer.", ".lora_A.", ".lora_B.", ".lora_embedding_A.", ".modules_to_save.", ".original_module.")


def names_of_adapters(names: Iterable[str]) -> list[str]:
    """The names that PEFT made. No inference server knows them."""
    return [name for name in names if name.startswith(ADAPTER_PREFIX) or any(mark in f".{name}" for mark in _MARKS)]


def has_adapters(model: Any) -> bool:
    return next(adapter_layers(model), None) is not None


def adapter_layers(model: Any) -> Iterator[Any]:
    """The layers that PEFT made."""
    kinds = _kinds()
    return (module for module in model.modules() if isinstance(module, kinds)) if kinds else iter(())


def merged(model: Any) -> Iterator[tuple[str, Any]]:
    """The weights with adapters merged, under the names of the model without adapters.

    Holds copies of all layers that have an adapter at the same time.
    """
    for config in _configs(model):
        if getattr(config, "is_prompt_learning", False):
            raise CheckpointError(
                f"this model's adapter ({config.peft_type}) cannot be merged into its weights",
                hint="publish the base model, and load the adapter in the inference server",
            )
    layers, outside = dict(_outermost(model)), _outside(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if not any(module in layers for module in _above(name)):
            yield name.replace(*outside, 1), value
    for module, layer in layers.items():
        for name, value in _merge(layer).state_dict(keep_vars=True).items():
            yield f"{module}.{name}".replace(*outside, 1), value


def _kinds() -> tuple[type, ...]:
    """The classes of PEFT layers that can be merged or replaced by their base layer."""
    tuners, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    found = [(tuners, "BaseTunerLayer"), (others, "AuxiliaryTrainingWrapper"), (others, "ModulesToSaveWrapper")]
    return tuple(getattr(module, kind) for module, kind in found if hasattr(module, kind))


def _configs(model: Any) -> Iterator[Any]:
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict):
            yield from configs.values()


def _outermost(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers with adapters, under all of their names, without layers nested in another one."""
    kinds, last = _kinds(), "."
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds) and not name.startswith(last):
            last = f"{name}."
            yield name, module


def _outside(model: Any) -> tuple[str, str]:
    """The prefix that PEFT adds around the model, and its replacement. Both empty if PEFT wraps only inner layers."""
    for name, module in model.named_modules():
        if hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
            before = f"{name}." if name else ""
            return f"{before}{ADAPTER_PREFIX}", before
    return "", ""


def _above(name: str) -> Iterator[str]:
    """The names of the modules that contain a weight, from the innermost."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _merge(layer: Any) -> Any:
    if getattr(layer, "disable_adapters", False):
        if getattr(layer, "merged", False):  # merged weights do not count while adapters are disabled
            layer = copy.deepcopy(layer)
            layer.unmerge()
        return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    twin = copy.deepcopy(layer)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        return twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    twin.merge()
    return twin.get_base_layer()
