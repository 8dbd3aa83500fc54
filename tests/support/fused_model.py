"""A model with another layout than its checkpoint: fused, sliced for one of several ranks, padded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from weightwire.delta.state import digest
from weightwire.engines.engine import ServedVersion
from weightwire.weights.dtypes import DTYPES

WIDTH, HEADS, VOCABULARY = 24, 16, 50
SHAPES = {
    "embed.weight": (VOCABULARY, WIDTH),
    "layer.q.weight": (HEADS, WIDTH),
    "layer.k.weight": (HEADS // 2, WIDTH),
    "layer.o.weight": (WIDTH, HEADS),
    "layer.norm.weight": (WIDTH,),
    "head.weight": (VOCABULARY, WIDTH),
}
SCHEMA = {name: (DTYPES["BF16"], shape) for name, shape in SHAPES.items()}

Arrays = dict[str, npt.NDArray[np.uint16]]


class Fused(torch.nn.Module):  # type: ignore[misc]
    """`rank` of `ranks`: rows of q and k, columns of o. The embedding has rows that no checkpoint has."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        rows = HEADS // ranks
        self.embed = torch.nn.Parameter(torch.zeros(64, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.qk = torch.nn.Parameter(torch.zeros(rows + rows // 2, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(WIDTH, rows, dtype=torch.bfloat16), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.head = torch.nn.Parameter(torch.zeros(64, WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        q, k = HEADS // self._ranks, HEADS // 2 // self._ranks
        for name, value in weights:
            if name in ("embed.weight", "head.weight"):
                target = getattr(self, name.split(".")[0]).data
                target[: len(value)].copy_(value)
                target[len(value) :].fill_(0)
            elif name == "layer.q.weight":
                self.qk.data[:q].copy_(value.narrow(0, self._rank * q, q))
            elif name == "layer.k.weight":
                self.qk.data[q:] = value.chunk(self._ranks)[self._rank]
                assert len(value.chunk(self._ranks)[self._rank]) == k
            elif name == "layer.o.weight":
                self.o.data.copy_(value[:, self._rank * q : (self._rank + 1) * q])
            elif name == "layer.norm.weight":
                self.norm.data.copy_(value)
            else:
                raise KeyError(name)


def arrays(seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 16, shape, np.uint16) for name, shape in SHAPES.items()}


def changed(before: Arrays, seed: int, chance: float = 0.1) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: bits + (random.random(bits.shape) < chance).astype(np.uint16) for name, bits in before.items()}


def weights_of(bits: Arrays) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: ("BF16", one.shape, one.tobytes()) for name, one in bits.items()}


def tensors_of(bits: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(one.view(np.int16).copy()).view(torch.bfloat16) for name, one in bits.items()}


def save(bits: Arrays, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(bits), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def holding(bits: Arrays, version: int, run: str = "a" * 32) -> ServedVersion:
    return ServedVersion(run, version, digest(weights_of(bits)).hex)


def contents(model: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: one.detach().contiguous().view(torch.int16).numpy().tobytes() for name, one in model.named_parameters()
    }


def loaded(bits: Arrays, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    """The contents of a model that loads these weights."""
    model = Fused(rank, ranks)
    model.load_weights(tensors_of(bits).items())
    return contents(model)
