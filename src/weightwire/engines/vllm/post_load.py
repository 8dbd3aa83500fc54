"""Learns what vLLM does to the weights of a model after it has loaded them.

vLLM packs experts for CPU kernels, pads them, and copies projections. With our backend, the layout is learned by probes
when the model is loaded, right after vLLM's own processing: before it serves, and wherever its weights came from.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from weightwire.engines.huge_pages import move_to_huge_pages
from weightwire.engines.relaid_model import RelaidModel, skeleton_of
from weightwire.engines.vllm.hooks import replace_in_vllm
from weightwire.engines.vllm.packing import is_our_backend
from weightwire.engines.weight_map import Load, tensors_of

__all__ = ["loaded_with", "observe_loading", "relaid_model_of", "shared_model_of"]

_log = logging.getLogger("vllm.weightwire")
_PARTS = ("vllm.model_executor.", "vllm.v1.attention.")
_LAYOUT = "weightwire_layout"  # an attribute of the model
_models: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()  # by the id of their config


def relaid_model_of(model: torch.nn.Module) -> RelaidModel | str:
    """The layout of a loaded model, or the reason why it is unknown."""
    layout: RelaidModel | str = model.__dict__.get(_LAYOUT, "vLLM loaded the model in a way that cannot be observed")
    return layout


def shared_model_of(model: torch.nn.Module) -> RelaidModel | str:
    """The layout of a loaded model, after vLLM has replaced modules of it by those of another model."""
    return _found(relaid_model_of(model), model)


def loaded_with(model_config: Any) -> torch.nn.Module | None:
    """The model that vLLM has loaded in this process with this very configuration."""
    return _models.get(id(model_config))


def observe_loading() -> None:
    """With our backend, makes vLLM's loaders learn the layout of each model that they load."""
    replace_in_vllm("vllm.model_executor.model_loader.base_loader", "process_weights_after_loading", _learning)


def _learning(process: Callable[..., None]) -> Callable[..., None]:
    def process_and_learn(model: torch.nn.Module, model_config: Any, target_device: torch.device) -> None:
        if not is_our_backend():
            process(model, model_config, target_device)
            return

        began = time.perf_counter()
        layout = _probed(model, process, model_config, target_device)
        process(model, model_config, target_device)
        model.__dict__[_LAYOUT] = _found(layout, model)
        _models[id(model_config)] = model
        _log.info("weightwire: learned the layout of the weights in %.1f s", time.perf_counter() - began)
        if moved := move_to_huge_pages(tensors_of(model).values()):
            _log.info("weightwire: moved %.2f GB of weights to huge pages", moved / 1e9)

    return process_and_learn


def _probed(model: torch.nn.Module, process: Any, model_config: Any, target_device: torch.device) -> RelaidModel | str:
    """Never raises: a model of unknown layout is served, too, and reloaded for each version."""
    from vllm.config import get_current_vllm_config, set_current_vllm_config

    config = get_current_vllm_config()

    def process_layer(layer: torch.nn.Module) -> None:
        with set_current_vllm_config(config):
            process(layer if type(layer) is type(model) else _Holder(layer), model_config, target_device)

    try:
        layout = RelaidModel(skeleton_of(model, is_part), process_layer, is_part, _loader_of)
        layout.keep_loaded(model)
        return layout
    except Exception as problem:
        return _unknown(problem)


def _loader_of(form: torch.nn.Module) -> Load:
    """The loader of a model. vLLM's own check for MTP layers is off: it does not tell what is missing, we do."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return form.load_weights  # type: ignore[no-any-return]

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with disable_mtp_completeness_check():
            form.load_weights(weights)

    return load


def _found(layout: RelaidModel | str, model: torch.nn.Module) -> RelaidModel | str:
    try:
        if isinstance(layout, RelaidModel):
            layout.find_places(model)
        return layout
    except Exception as problem:
        return _unknown(problem)


def _unknown(problem: Exception) -> str:
    _log.warning("weightwire: the layout of the weights cannot be learned", exc_info=problem)
    return f"the layout of the weights cannot be learned ({type(problem).__name__}: {problem})"


class _Holder(torch.nn.Module):  # type: ignore[misc]
    """vLLM processes whole models. This is one with a single layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


def is_part(value: object) -> bool:
    """Objects in vLLM's layers that hold or process weights, such as quantization methods and kernels."""
    return type(value).__module__.startswith(_PARTS) and hasattr(value, "__dict__") and not isinstance(value, type)
