"""Torch models and tensors, and helpers that read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from weightwire import digest
from weightwire.weights.tensor import Tensor, Weights
from weightwire.weights.torch_source import Casting, read_live

AS_IT_IS = Casting(None)


def read(source: Any, casting: Casting = AS_IT_IS, **options: Any) -> Weights:
    return read_live(source, casting, **options)[0]


def one(value: Any, casting: Casting = AS_IT_IS) -> Tensor:
    """Reads one tensor named x."""
    return read({"x": value}, casting)["x"]


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, copied in two uneven parts."""
    out = np.zeros(tensor.count, f"<u{tensor.dtype.unit}")
    cut = tensor.count // 3
    tensor.copy_to(0, cut, out[:cut])
    tensor.copy_to(cut, tensor.count, out[cut:])
    return out.tobytes()


def bits_of(value: Any) -> bytes:
    """The bits of a torch tensor, in order."""
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def state_of(weights: dict[str, Any]) -> Any:
    return digest({name: value.detach().contiguous() for name, value in weights.items()})


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 10, bias=False))


def every_float() -> Any:
    """float32 of every exponent and of all kinds: NaNs of many payloads, infinities, denormals, ties."""
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), generator=generator, dtype=torch.int64).to(torch.int32)
    special = [0, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF]
    signed = [x - 2**32 if x >= 2**31 else x for y in special for x in (y, y | 1 << 31)]
    return torch.cat([torch.tensor(signed, dtype=torch.int32), some]).view(torch.float32)


def tied_model() -> Any:
    layers = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    layers[1].weight = layers[0].weight
    return layers
