"""PEFT: which models carry adapters, and what their weights are with the adapters merged into them.

Knows the names that PEFT gives and the few calls that its layers have; never imports it. The model stays as it is: each
layer is merged in a copy of it. Knows nothing of bits.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from weightwire.errors import CheckpointError

__all__ = ["has_adapters", "merged", "names_of_adapters"]

_PREFIX = "base_model.model."
_MARKS = (".base_layer.", ".lora_A.", ".lora_B.", ".lora_embedding_A.", ".modules_to_save.", ".original_module.")


def names_of_adapters(names: Iterable[str]) -> list[str]:
    """Those among the names of weights that PEFT gave: no inference server knows them."""
    return [name for name in names if name.startswith(_PREFIX) or any(mark in f".{name}" for mark in _MARKS)]


def has_adapters(model: Any) -> bool:
    kinds = _kinds()
    return bool(kinds) and any(isinstance(module, kinds) for module in model.modules())


def merged(model: Any) -> Iterator[tuple[str, Any]]:
    """The weights that the model computes with, under the names it has without adapters.

    They are held all at once, as copies of the layers that have an adapter.
    """
    for config in _configs(model):
        if getattr(config, "is_prompt_learning", False):
            raise CheckpointError(
                f"this model's adapter ({config.peft_type}) cannot be merged into its weights",
                hint="publish the base model, and give the adapter to the inference server",
            )
    layers, outside = dict(_outermost(model)), _outside(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if not any(module in layers for module in _above(name)):
            yield name.replace(*outside, 1), value
    for module, layer in layers.items():
        for name, value in _merge(layer).state_dict(keep_vars=True).items():
            yield f"{module}.{name}".replace(*outside, 1), value


def _kinds() -> tuple[type, ...]:
    """Layers that hold something beside the weights of a model: they can be told to merge, and what is left then."""
    tuners, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    found = [(tuners, "BaseTunerLayer"), (others, "AuxiliaryTrainingWrapper"), (others, "ModulesToSaveWrapper")]
    return tuple(getattr(module, kind) for module, kind in found if hasattr(module, kind))


def _configs(model: Any) -> Iterator[Any]:
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict):
            yield from configs.values()


def _outermost(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers with adapters, under all of their names, but for those inside of another one."""
    kinds, last = _kinds(), "."
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds) and not name.startswith(last):
            last = f"{name}."
            yield name, module


def _outside(model: Any) -> tuple[str, str]:
    """What names begin with where PEFT is around the model, and without it. An adapter may be inside of it only."""
    for name, module in model.named_modules():
        if hasattr(module, "get_base_model") and hasattr(module, "peft_config"):
            before = f"{name}." if name else ""
            return f"{before}{_PREFIX}", before
    return "", ""


def _above(name: str) -> Iterator[str]:
    """The names of the modules that a weight is in."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _merge(layer: Any) -> Any:
    if getattr(layer, "disable_adapters", False):
        if getattr(layer, "merged", False):  # which does not count while they are disabled
            layer = copy.deepcopy(layer)
            layer.unmerge()
        return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    twin = copy.deepcopy(layer)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        return twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    twin.merge()
    return twin.get_base_layer()
