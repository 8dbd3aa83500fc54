"""Measures how a mixture of experts is patched in a real vLLM: 128 experts against 8, with the same number of changes.

    python benchmarks/experts.py            # 100 million weights in experts, 100,000 changes
    python benchmarks/experts.py --json

Both models have the same number of weights: many small experts against few large ones. They run in this process, on its
CPU, without a server, so that a swap is timed alone: from the order to the worker's answer. In every round each model
is patched to another version and back, and only times of the same round are compared. The first round does not count.

After the last round, every tensor of both models must equal those of a model that vLLM loads afresh.

Needs torch, transformers, vLLM (built for CPUs), 4 GB of memory and Linux.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import benchmark_parser
from benchmark_run import run_benchmark
from process_tree import processor_seconds_of_others
from table import BUSY, Bar, Report, Row

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import weightwire
from support.offline_vllm import OfflineEngine, differing, offline_model, set_environment, version_of
from support.vllm_families import family_model
from weightwire.engines import ServedVersion, Swap
from weightwire.weights import Checkpoint

FEW, MANY = 8, 128
HIDDEN, LAYERS, INNER = 512, 4, 16384  # INNER: rows of all experts of a layer together
CHANGES = 100_000


def main() -> None:
    arguments = parse_arguments()
    set_environment()
    run_benchmark(lambda scratch: [measure(arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure how a mixture of experts is patched: 128 experts against 8.")
    parser.add_argument("--rounds", type=int, default=11, help="times that each model is patched (default: 11)")
    return parser.parse_args()


@dataclass
class Model:
    """A running model and two versions of it, with the patches between them."""

    running: Any
    engine: OfflineEngine
    checkpoints: list[Path]
    versions: list[ServedVersion]
    number: int = 1

    def patch(self) -> Swap:
        """Patches it to its other version."""
        before, after = self.checkpoints
        self.checkpoints, self.versions = [after, before], self.versions[::-1]
        self.number += 1
        target = ServedVersion(self.versions[0].run, self.number, self.versions[0].state)
        return self.engine.patch(weightwire.diff(Checkpoint(before), Checkpoint(after), coo=True), target)


def start(experts: int, scratch: Path) -> Model:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts": experts}
    first = family_model("qwen3_moe", scratch / f"{experts}-0", moe_intermediate_size=INNER // experts, **sizes)
    second = change_experts(first, scratch / f"{experts}-1")
    running = offline_model(first)
    engine = OfflineEngine(running, port=experts)
    engine.attach()
    checkpoints = [first, second]
    versions = [version_of(one, 1) for one in checkpoints]
    if not engine.adopt(first, versions[0]):
        raise SystemExit("vLLM does not hold the weights that it was started with")
    return Model(running, engine, checkpoints, versions)


def change_experts(before: Path, directory: Path) -> Path:
    """Flips the sign of the same number of weights, spread over all experts."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(before, directory)
    weights = load_file(directory / "model.safetensors")
    experts = [name for name in weights if ".experts." in name]
    random = torch.Generator().manual_seed(1)
    for number, name in enumerate(experts):
        count = CHANGES * (number + 1) // len(experts) - CHANGES * number // len(experts)
        flat = weights[name].view(-1).view(torch.int16)
        flat[torch.randperm(len(flat), generator=random)[:count]] ^= -0x8000
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def measure(rounds: int, scratch: Path) -> Report:
    models = {experts: start(experts, scratch) for experts in (FEW, MANY)}
    busy, seconds = processor_seconds_of_others(), 0.0
    swaps: dict[int, list[Swap]] = {experts: [] for experts in models}
    for _ in range(rounds):
        for experts, model in models.items():
            swaps[experts].append(model.patch())
            seconds += swaps[experts][-1].paused + swaps[experts][-1].staged
    others = (processor_seconds_of_others() - busy) / seconds
    for experts, model in models.items():
        [wrong] = model.running.collective_rpc(differing, args=(str(model.checkpoints[0]),))
        if wrong:
            raise SystemExit(f"{experts} experts: {wrong[0]} differs from a fresh model")
        model.engine.close()
    title = f"{LAYERS} layers with {3 * HIDDEN * INNER * LAYERS:,} weights in experts, {CHANGES:,} changes"
    return Report(title, {}, CHANGES, 0, [], [*rows(swaps), Row(BUSY, others, "{:.2f}", None)])


def rows(swaps: dict[int, list[Swap]]) -> Iterator[Row]:
    for what, bar in (("paused", Bar(1.3)), ("staged", None)):
        few, many = ([getattr(one, what) for one in swaps[experts][1:]] for experts in (FEW, MANY))
        ratios = sorted(large / small for small, large in zip(few, many, strict=True))
        times = f"{1e3 * statistics.median(few):.1f} and {1e3 * statistics.median(many):.1f} ms"
        note = f"{ratios[0]:.2f} to {ratios[-1]:.2f}; {times}"
        yield Row(f"{what}: {MANY} / {FEW} experts", statistics.median(ratios), "{:.2f}", bar, note)


if __name__ == "__main__":
    main()
