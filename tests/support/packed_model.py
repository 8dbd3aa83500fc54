"""A model that is rearranged after loading, as by vLLM: experts are padded and packed, projections copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from support.fused_model import Arrays, contents, tensors_of
from weightwire.engines.relaid_model import RelaidModel, skeleton_of
from weightwire.weights.dtypes import DTYPES

HIDDEN, INNER, BLOCK = 8, 6, 4


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


class Packer:
    """Packs a tensor once. Like vLLM's kernels, it keeps state, so that the same one does not pack again."""

    def __init__(self) -> None:
        self.is_done = False

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Rows in blocks, padded, with the rows of a block next to each other."""
        experts, rows, columns = weight.shape
        padded = weight.new_zeros(experts, -(-rows // BLOCK) * BLOCK, columns)
        padded[:, :rows] = weight
        return padded.view(experts, -1, BLOCK, columns).transpose(2, 3).contiguous().view(padded.shape)


class Experts(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, count: int, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._rows = rank, INNER // ranks
        self.packer = Packer()
        self.up = _parameter(count, 2 * self._rows, HIDDEN)
        self.down = _parameter(count, HIDDEN, self._rows)

    def load(self, expert: int, kind: str, value: torch.Tensor) -> None:
        rows = slice(self._rank * self._rows, (self._rank + 1) * self._rows)
        if kind == "down":
            self.down.data[expert].copy_(value[:, rows])
        else:
            half = self.up.data[expert].chunk(2)[kind == "up"]
            half.copy_(value[rows])

    def process(self) -> None:
        if not self.packer.is_done:
            self.packer.is_done = True
            self.up = torch.nn.Parameter(self.packer.pack(self.up.data), requires_grad=False)
            self.down = torch.nn.Parameter(self.packer.pack(self.down.data), requires_grad=False)


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Keeps a projection, and copies of its halves: one transposed, one in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = _parameter(2 * HIDDEN, HIDDEN)
        self.scale = torch.ones(3)
        self.as_view: torch.Tensor | None = None

    def process(self) -> None:
        keys, values = self.kv.data.chunk(2)
        self.keys_t = torch.nn.Parameter(keys.t().contiguous(), requires_grad=False)
        copy = values.clone()
        self.project = lambda x: x @ copy
        self.as_view = self.kv.data[:2]


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, experts: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.attention = Attention()
        self.experts = Experts(experts, rank, ranks)
        self.norm = _parameter(HIDDEN)


class Packed(torch.nn.Module):  # type: ignore[misc]
    """`rank` of `ranks`: rows of gate and up, columns of down."""

    def __init__(self, experts: int = 3, layers: int = 2, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.embed = _parameter(10, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(experts, rank, ranks) for _ in range(layers))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            if name == "embed":
                self.embed.data.copy_(value)
                continue
            number, kind, *rest = name.split(".")
            layer = self.layers[int(number)]
            if kind == "experts":
                layer.experts.load(int(rest[0]), rest[1], value)
            elif kind == "kv":
                layer.attention.kv.data.copy_(value)
            elif kind == "norm":
                layer.norm.data.copy_(value)
            else:
                raise KeyError(name)


def process(model: torch.nn.Module) -> None:
    """What the engine does after loading."""
    for module in model.modules():
        if hasattr(module, "process"):
            module.process()


def is_part(value: object) -> bool:
    return isinstance(value, Packer)


def loader_of(model: torch.nn.Module) -> Any:
    return model.load_weights


def shapes(experts: int = 3, layers: int = 2) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed", (10, HIDDEN)
    for layer in range(layers):
        yield f"{layer}.kv", (2 * HIDDEN, HIDDEN)
        yield f"{layer}.norm", (HIDDEN,)
        for expert in range(experts):
            yield f"{layer}.experts.{expert}.gate", (INNER, HIDDEN)
            yield f"{layer}.experts.{expert}.up", (INNER, HIDDEN)
            yield f"{layer}.experts.{expert}.down", (HIDDEN, INNER)


def schema(experts: int = 3, layers: int = 2) -> dict[str, Any]:
    return {name: (DTYPES["BF16"], shape) for name, shape in shapes(experts, layers)}


def packed_arrays(seed: int = 0, experts: int = 3, layers: int = 2) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 1 << 16, shape, np.uint16) for name, shape in shapes(experts, layers)}


def started(bits: Arrays, model: torch.nn.Module, process: Any = process) -> RelaidModel:
    """Loads and processes a model, as an engine does when it starts."""
    model.load_weights(tensors_of(bits).items())
    relaid = RelaidModel(skeleton_of(model, is_part), process, is_part, loader_of)
    relaid.keep_loaded(model)
    process(model)
    relaid.find_places(model)
    return relaid


def everything(model: Packed) -> dict[str, bytes]:
    """All weights of a processed model, also those that are no parameters."""
    enclosed = {}
    for number, layer in enumerate(model.layers):
        [cell] = layer.attention.project.__closure__
        enclosed[f"{number}.enclosed"] = cell.cell_contents.view(torch.int16).numpy().tobytes()
    return {**contents(model), **enclosed}


def processed(bits: Arrays, experts: int = 3, layers: int = 2, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    """The contents of a model that loads and processes these weights."""
    model = Packed(experts, layers, rank, ranks)
    model.load_weights(tensors_of(bits).items())
    process(model)
    return everything(model)
