"""A vLLM worker extension that loads vLLM's own checkpoint patches from a file, for comparison in pause.py.

vLLM has the function, but nothing in vLLM calls it on a CPU. Passed as `--worker-extension-cls`, this class works next
to the weight transfer backend, so one server can take all kinds of updates.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

from weightwire.delta import Delta
from weightwire.engines.vllm.model_desk import checkpoint_patches


class CheckpointPatches:
    """Mixed into a vLLM worker and called through `collective_rpc`."""

    model_runner: Any

    def load_patches_from(self, path: str) -> dict[str, float]:
        """Reads a patch as our engine does and loads it with vLLM. Returns the seconds of both parts."""
        began = time.perf_counter()
        delta = Delta.open(path)
        patches = checkpoint_patches(delta, delta.entries)
        read = time.perf_counter()
        load_checkpoint_weight_patches(self.model_runner.get_model(), patches)
        return {"read": read - began, "load": time.perf_counter() - read}
