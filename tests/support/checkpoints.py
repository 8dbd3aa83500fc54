"""Checkpoints on disk, made with the stock library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

Arrays = dict[str, npt.NDArray[Any]]


def numbers(*shape: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def save_sharded(directory: Path, shards: Mapping[str, Arrays], **metadata: Any) -> Path:
    """A directory as transformers saves it."""
    directory.mkdir(exist_ok=True)
    for name, arrays in shards.items():
        safetensors.numpy.save_file(arrays, directory / name, metadata={"format": "pt"})
    index = {
        "metadata": metadata,
        "weight_map": {name: shard for shard, arrays in shards.items() for name in arrays},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


def tree(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
