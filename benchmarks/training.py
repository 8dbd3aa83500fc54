"""A trainer's weights, step by step, as published by publish.py, sync.py and pause.py.

The source is a recording: one that record.py wrote, or synthetic steps written to a temporary directory, which takes
some seconds. Its checkpoints are mapped and visited back and forth, which gives any number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from flat_weights import FlatWeights, flat_copy
from recording import read_checkpoint, write_checkpoint
from synthetic import qwen3_shapes, synthetic_steps

SYNTHETIC_STEPS = 2


class Training:
    """`live` holds the weights in the trainer's memory. `step` replaces them with the next checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.facts: dict[str, Any] = json.loads((directory / "recording.json").read_text())
        self.first = directory / self.facts["checkpoints"][0]
        checkpoints = [read_checkpoint(directory / name) for name in self.facts["checkpoints"]]
        self.live: FlatWeights = flat_copy(checkpoints[0])
        self._next: Iterator[Any] = cycle([*checkpoints[1:], *reversed(checkpoints[:-1])])

    def step(self) -> None:
        for name, bits in next(self._next).items():
            np.copyto(self.live.bits[name], bits)

    @property
    def title(self) -> str:
        facts, nbytes = self.facts, self.live.flat.nbytes
        source = "recorded" if "torch" in facts else "synthetic"
        shape = (
            f"{nbytes / 1e9:.2f} GB of bf16 in {len(self.live.bits)} tensors, {len(facts['checkpoints'])} checkpoints"
        )
        return f"{source}: {facts['model']}, {facts['stage']}, lr {facts['lr']:g}: {shape}"

    @property
    def shown_facts(self) -> dict[str, Any]:
        """The facts of the recording without the long list of shapes."""
        return {key: value for key, value in self.facts.items() if key != "shapes"}


def open_training(recording: Path | None, scratch: Path) -> Training:
    directory = write_synthetic(scratch / "synthetic") if recording is None else recording
    return Training(directory)


def write_synthetic(directory: Path) -> Path:
    names = [f"step-{index:05d}" for index in range(SYNTHETIC_STEPS + 1)]
    for name, bits in zip(names, synthetic_steps("early", SYNTHETIC_STEPS, qwen3_shapes()), strict=True):
        write_checkpoint(bits, directory / name)
    facts = {"stage": "early", "lr": 1e-6, "model": "qwen3", "checkpoints": names}
    (directory / "recording.json").write_text(json.dumps(facts) + "\n")
    return directory
