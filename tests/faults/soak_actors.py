"""The processes of a soak: a garbage collector, and followers with an engine that compares every version bit by bit.

The trainer is the one of `actors.py`. The weights depend only on seed and step, and name their own step, so an engine
can compute what it should serve.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.actors import SHAPES, Engine, Journal, become_actor, sample, say, weights_at
from weightwire import Tensor
from weightwire.bucket.registry import open_bucket
from weightwire.errors import BucketError, NoRun, WeightwireError
from weightwire.follower.follower import Follower
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import Retention
from weightwire.weights import DTYPES

SAMPLE_EVERY = 1.0  # seconds


class Comparison:
    """Compares what an engine serves with the trainer's weights, and records the result of every version."""

    def __init__(self, log: Journal, seed: int) -> None:
        self._log = log
        self._seed = seed

    def serve(self, version: int, state: str, weights: Mapping[str, Tensor]) -> None:
        step = int(weights["steps"].bits.view("<i8")[0])
        expected = weights_at(self._seed, step)
        exact = weights.keys() == expected.keys() and all(
            np.array_equal(weights[name].bits.reshape(-1), one.bits.reshape(-1)) for name, one in expected.items()
        )
        self._log.add(sync=False, what="serves", version=version, state=state, step=step, exact=exact)


def serve_torch(follower: Follower, comparison: Comparison) -> None:
    """Keeps a torch module at the newest version, and compares it after every swap."""
    # Here, because torch takes seconds to import.
    import torch

    from weightwire.engines.torch import TorchEngine
    from weightwire.engines.version_keeper import Keeper

    torch.set_num_threads(1)
    module = _module(torch)
    engine = TorchEngine(module, threads=1)
    keeper = Keeper(follower, [engine], on_event=say)
    last: int | None = None
    while True:
        for update in follower.watch(timeout=0.25):
            keeper.bring(update)
            break
        keeper.retry_failed()
        with engine.serving() as version:
            if version is not None and version != last and engine.holding is not None:
                comparison.serve(version, engine.holding.state, _bits(torch, module))
                last = version


def _module(torch: Any) -> Any:
    """A module with the trainer's tensors."""
    module = torch.nn.Module()
    for name, (kind, shape) in SHAPES.items():
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}[kind]
        *path, leaf = name.split(".")
        owner = module
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(leaf, torch.zeros(shape, dtype=dtype))
    return module


def _bits(torch: Any, module: Any) -> dict[str, Tensor]:
    found = {}
    for name, tensor in module.state_dict().items():
        kind, shape = SHAPES[name]
        dtype = DTYPES[kind]
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.unit]
        found[name] = Tensor(dtype, shape, tensor.reshape(-1).view(integers).numpy().view(f"<u{dtype.unit}"))
    return found


def follow(url: str, room: Path, name: str, into: Path, seed: int, engine: str) -> None:
    log = Journal(room / f"{name}.log")
    with Follower(url, into=into, name=name, threads=1, on_event=say) as follower:
        log.add(sync=False, what="started")
        threading.Thread(target=sample, args=(follower, log, SAMPLE_EVERY), daemon=True).start()
        comparison = Comparison(log, seed)
        if engine == "torch":
            serve_torch(follower, comparison)
        else:
            Engine(follower, log, comparison.serve).run()


def collect(url: str, room: Path, name: str, every: float, retention: Retention) -> None:
    """Sweeps again and again, also after a store did not answer."""
    log = Journal(room / f"{name}.log")
    bucket = open_bucket(url)
    while True:
        try:
            swept = asyncio.run(sweep(bucket, Runtime(), retention))
            log.add(sync=False, what="swept", objects=len(swept.removed), nbytes=swept.nbytes, below=swept.below)
        except (BucketError, NoRun) as problem:
            log.add(sync=False, what="failed", why=problem.message)
        time.sleep(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["gc", "patches", "torch"])
    parser.add_argument("url")
    parser.add_argument("room", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=3.0)
    parser.add_argument("--window", type=float, default=10.0)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    become_actor(args.parent)
    try:
        if args.role == "gc":
            collect(args.url, args.room, args.name, args.every, Retention(2, args.window, args.grace))
        else:
            follow(args.url, args.room, args.name, args.into, args.seed, args.role)
    except WeightwireError as problem:
        print(f"{time.time():.3f} ended: {problem!r}", flush=True)
        raise


if __name__ == "__main__":
    main()
