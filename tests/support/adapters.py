"""PEFT models with adapters that change what the tiny model of `vllm_server` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["adapted_layer", "peft_model", "train_step"]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(base: Path, *, rank: int = 4) -> Any:
    """The adapter is in float32, as PEFT makes it by default."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)


def adapted_layer() -> Any:
    """A PEFT model of one layer."""
    import peft
    import torch

    return peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(4, 4)), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"])
    )


def train_step(model: Any, seed: int) -> None:
    """Changes every weight of the adapter."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=random)
