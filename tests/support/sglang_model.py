"""A model that loads its weights as SGLang's models do: fused, sliced for a rank, tied, with experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from support.fused_model import Arrays, contents, tensors_of

HIDDEN, HEADS, INNER, EXPERTS, VOCABULARY = 8, 8, 12, 3, 20
_STACKED = [
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
]
_EXPERT = {"gate_proj": ("w13_weight", "w1"), "up_proj": ("w13_weight", "w3"), "down_proj": ("w2_weight", "w2")}


class UnquantizedLinearMethod:
    """As SGLang calls it for weights that stay as they are."""


def _weight(*shape: int, **attributes: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)
    made.__dict__.update(attributes)
    return made


class _Stacked(torch.nn.Module):  # type: ignore[misc]
    """Rows of several projections, one after the other. Each rank has its part of each."""

    def __init__(self, sizes: dict[Any, int], rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.quant_method = rank, UnquantizedLinearMethod()
        self.sizes = {shard: size // ranks for shard, size in sizes.items()}
        self.weight = _weight(sum(self.sizes.values()), HIDDEN, weight_loader=self.weight_loader)

    def weight_loader(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard: Any) -> None:
        shards, size = list(self.sizes), self.sizes[shard]
        start = sum(self.sizes[one] for one in shards[: shards.index(shard)])
        param.data.narrow(0, start, size).copy_(loaded.narrow(0, self.rank * size, size))


class _Row(torch.nn.Module):  # type: ignore[misc]
    """Columns of one projection."""

    def __init__(self, columns: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.quant_method = rank, UnquantizedLinearMethod()
        self.weight = _weight(HIDDEN, columns // ranks, weight_loader=self.weight_loader)

    def weight_loader(self, param: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        size = param.shape[1]
        param.data.copy_(loaded.narrow(1, self.rank * size, size))


class _Experts(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.inner = rank, INNER // ranks
        self.w13_weight = _weight(EXPERTS, 2 * self.inner, HIDDEN, weight_loader=self.weight_loader)
        self.w2_weight = _weight(EXPERTS, HIDDEN, self.inner, weight_loader=self.weight_loader)

    def weight_loader(self, param: torch.nn.Parameter, loaded: torch.Tensor, shard: str, expert: int) -> None:
        own = loaded.narrow(1 if shard == "w2" else 0, self.rank * self.inner, self.inner)
        target = param.data[expert]
        (target if shard == "w2" else target.narrow(0, self.inner * (shard == "w3"), self.inner)).copy_(own)


class _Norm(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = _weight(HIDDEN)


class _Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.qkv_proj = _Stacked({"q": HEADS, "k": HEADS // 2, "v": HEADS // 2}, rank, ranks)
        self.o_proj = _Row(HEADS, rank, ranks)
        self.gate_up_proj = _Stacked({0: INNER, 1: INNER}, rank, ranks)
        self.down_proj = _Row(INNER, rank, ranks)
        self.experts = _Experts(rank, ranks)
        self.norm = _Norm()


class SglangModel(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, rank: int = 0, ranks: int = 1, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = _Norm()
        self.embed_tokens.weight = _weight(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(_Layer(rank, ranks) for _ in range(layers))
        self.lm_head = self.embed_tokens  # tied

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, loaded in weights:
            if name == "lm_head.weight":
                continue
            if ".experts." in name:
                before, expert, projection = name.removesuffix(".weight").rsplit(".", 2)
                target, shard = _EXPERT[projection]
                param = params[f"{before}.{target}"]
                param.weight_loader(param, loaded, shard, int(expert))
                continue
            for fused, part, shard_id in _STACKED:
                if f".{part}." in name:
                    param = params[name.replace(part, fused)]
                    param.weight_loader(param, loaded, shard_id)
                    break
            else:
                param = params[name]
                getattr(param, "weight_loader", lambda param, loaded: param.data.copy_(loaded))(param, loaded)


def sglang_arrays(seed: int = 0, layers: int = 2) -> Arrays:
    """A checkpoint of the model. The tied head is saved as well."""
    shapes = {"embed_tokens.weight": (VOCABULARY, HIDDEN)}
    inner, outer = (INNER, HIDDEN), (HIDDEN, INNER)
    for index in range(layers):
        own = {"q_proj": (HEADS, HIDDEN), "k_proj": (HEADS // 2, HIDDEN), "v_proj": (HEADS // 2, HIDDEN)}
        own |= {"o_proj": (HIDDEN, HEADS), "gate_proj": inner, "up_proj": inner, "down_proj": outer}
        for expert in range(EXPERTS):
            mlp = {"gate_proj": inner, "up_proj": inner, "down_proj": outer}
            own |= {f"experts.{expert}.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in own.items()}
        shapes[f"layers.{index}.norm.weight"] = (HIDDEN,)  # type: ignore[assignment]
    random = np.random.default_rng(seed)
    return with_tied_head({name: random.integers(0, 1 << 16, shape, np.uint16) for name, shape in shapes.items()})


def with_tied_head(bits: Arrays) -> Arrays:
    return {**bits, "lm_head.weight": bits["embed_tokens.weight"].copy()}


def loaded_contents(bits: Arrays, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    """The contents of a fresh model that loads these weights."""
    model = SglangModel(rank, ranks)
    model.load_weights(tensors_of(bits).items())
    return contents(model)
