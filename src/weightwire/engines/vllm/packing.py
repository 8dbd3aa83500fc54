"""Keeps the weights of a vLLM model in a layout that can be patched, and finds those that are not.

On CPUs, vLLM packs the weights of linear layers for its kernels and drops the originals. A packed copy cannot be
patched, so with our backend vLLM does not make it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weightwire.engines.vllm.hooks import replace_in_vllm, uses_weightwire

__all__ = ["experts_on_cpu", "is_our_backend", "keep_plain", "relaid_out"]


def keep_plain() -> None:
    """With our backend, makes linear layers on a CPU keep their weights as loaded."""
    replace_in_vllm("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", _keeping_plain)


def _keeping_plain(pack: Callable[..., None]) -> Callable[..., None]:
    def pack_unless_ours(layer: Any, remove_weight: bool) -> None:
        if is_our_backend() and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    return pack_unless_ours


def is_our_backend() -> bool:
    from vllm.config import get_current_vllm_config

    return uses_weightwire(get_current_vllm_config())


def relaid_out(model: torch.nn.Module) -> str:
    """The first layer with weights where probes cannot see them, with the reason; empty if none."""
    for name, module in model.named_modules():
        if any(value is not None and _holds_weights(value) for value in _enclosed(getattr(module, "cpu_linear", None))):
            return f"{name}: the weights are packed for the CPU"
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            return f"{name}: the weights are packed and dropped"
    return ""


def experts_on_cpu(model: torch.nn.Module) -> str:
    """The first mixture of experts that vLLM packs for the CPU, and cannot reload; empty if none."""
    for name, module in model.named_modules():
        weight = getattr(module, "w13_weight", None)  # the attribute of a mixture of experts
        if isinstance(weight, torch.Tensor) and weight.device.type == "cpu":
            return str(name)
    return ""


def _enclosed(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _holds_weights(value: Any) -> bool:
    return not isinstance(value, bool | int | float | str) and not callable(value)
