"""Inside vLLM: its own checkpoint patches, as an update from a file. What pause.py compares with.

vLLM has the function and nobody who calls it on a CPU. This is the least that does: given to a server as
`--worker-extension-cls`, it stands beside the weight transfer backend, so that one server takes all kinds of updates.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from weightwire.delta.decoder import changes
from weightwire.delta.file import Delta
from weightwire.engines.weight_map import torch_dtype


class CheckpointPatches:
    """Part of a worker, for `collective_rpc`."""

    model_runner: Any

    def load_patches_from(self, path: str) -> dict[str, float]:
        """Reads a patch as our engine does, and has vLLM load it. Returns how long either took."""
        began = time.perf_counter()
        patches = read_patches(path)
        read = time.perf_counter()
        load_checkpoint_weight_patches(self.model_runner.get_model(), patches)
        return {"read": read - began, "load": time.perf_counter() - read}


def read_patches(path: str) -> list[CheckpointWeightPatch]:
    delta = Delta.open(path)
    patches = []
    for name, entry in delta.entries.items():
        positions, values = changes({}, delta, name)
        dtype = torch_dtype(name, entry.dtype)
        new = torch.from_numpy(np.array(values).view(f"<i{entry.dtype.unit}")).view(dtype)
        patches.append(CheckpointWeightPatch(name, entry.shape, dtype, new, torch.from_numpy(positions)))
    return patches
