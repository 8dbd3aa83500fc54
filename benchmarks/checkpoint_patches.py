"""Inside vLLM: its own checkpoint patches, as an update from a file. What pause.py compares with.

vLLM has the function and nobody who calls it on a CPU. This is the least that does: given to a server as
`--worker-extension-cls`, it stands beside the weight transfer backend, so that one server takes all kinds of updates.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

from weightwire.delta import Delta
from weightwire.engines.vllm.plugin import checkpoint_patches


class CheckpointPatches:
    """Part of a worker, for `collective_rpc`."""

    model_runner: Any

    def load_patches_from(self, path: str) -> dict[str, float]:
        """Reads a patch as our engine does, and has vLLM load it. Returns how long either took."""
        began = time.perf_counter()
        delta = Delta.open(path)
        patches = checkpoint_patches(delta, delta.entries)
        read = time.perf_counter()
        load_checkpoint_weight_patches(self.model_runner.get_model(), patches)
        return {"read": read - began, "load": time.perf_counter() - read}
