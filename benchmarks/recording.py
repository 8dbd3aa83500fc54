"""Reads and writes checkpoints in the form of record.py. bf16 tensors are mapped from the files as uint16 bits.

Depends only on NumPy, so the benchmarks run without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = dict[str, NDArray[np.uint16]]


def read_recording(directory: Path) -> tuple[dict[str, Any], Bits, Bits]:
    """Returns the contents of recording.json, and the weights before and after the last step."""
    description: dict[str, Any] = json.loads((directory / "recording.json").read_text())
    before, after = description["checkpoints"][-2:]
    return description, read_checkpoint(directory / before), read_checkpoint(directory / after)


def read_checkpoint(directory: Path) -> Bits:
    file = np.memmap(directory / "model.safetensors", dtype=np.uint8, mode="r")
    header, data = read_header(file)
    weights = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{directory}: tensor {name} is {entry['dtype']}; record.py writes BF16 only")
        start, end = entry["data_offsets"]
        weights[name] = file[data + start : data + end].view(np.uint16).reshape(entry["shape"])
    return weights


def read_header(file: NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the offset of its data."""
    data = 8 + int(file[:8].view("<u8")[0])
    header: dict[str, Any] = json.loads(bytes(file[8:data]))
    header.pop("__metadata__", None)
    return header, data


def make_header(weights: Bits) -> bytes:
    """The header of a safetensors file with these weights in this order."""
    header, end = {}, 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_checkpoint(weights: Bits, directory: Path) -> None:
    """Writes a checkpoint directory as record.py does, without the config."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(make_header(weights))
        for tensor in weights.values():
            file.write(tensor.data)
