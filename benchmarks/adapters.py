"""Measures the update of a LoRA adapter in a real vLLM, and what clients of the base model notice of it.

    python benchmarks/adapters.py            # rank 16 on all linear layers of Qwen3-0.6B's shape
    python benchmarks/adapters.py --json

A real vLLM runs on this machine's CPU. Clients stream completions of the base model all the time. In every round
nothing happens for some seconds, and then a version of the adapter, in which every weight changed, is published,
followed and loaded. The first round does not count. vLLM loads an adapter between two steps of the model, so an update
takes at least what is left of the running step.

Needs torch, transformers, peft, vLLM (built for CPUs), 12 GB of memory and Linux.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from arguments import benchmark_parser
from benchmark_run import run_benchmark
from child_process import PATIENCE
from pause import CLIENTS, Streams, no_update, observe
from rounds import OTHERS, Spread, Times, range_of, ratio_row
from stream_gaps import Measured, gaps, gaps_in, longest_gaps
from table import BUSY, Bar, Report, Row
from training import open_training
from vllm_server import LONGEST, VLLM, make_model

from support.adapters import peft_model, train_step
from support.stores import running
from weightwire import Follower, Publisher
from weightwire.engines import ServedVersion
from weightwire.engines.vllm import VllmLoraEngine

RANK = 16
LONGEST_UPDATE = Bar(50.0)  # milliseconds


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: [measure(arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure the update of a LoRA adapter in a vLLM server.")
    parser.add_argument("--rounds", type=int, default=9, help="updates (default: 9)")
    return parser.parse_args()


def measure(count: int, scratch: Path) -> Report:
    training = open_training(None, scratch)
    facts, first, load = training.shown_facts, training.first, os.getloadavg()[0]
    del training
    model = make_model(first, scratch / "model")
    measured = measure_updates(model, count, scratch / "server")
    title = f"adapter of rank {RANK} on Qwen3-0.6B's shape, {CLIENTS} clients of the base model"
    title = f"{title}\n  load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    return Report(title, facts, 0, 0, [], list(rows_of(measured)))


class Adapter:
    """Trains an adapter, publishes it as a run, and loads each version into the server."""

    def __init__(self, stack: ExitStack, server: VLLM, model: Path, scratch: Path) -> None:
        self._peft: Any = peft_model(model, rank=RANK)
        self._publisher = stack.enter_context(Publisher(scratch / "bucket"))
        self._follower = stack.enter_context(Follower(scratch / "bucket", into=scratch / "replica"))
        self._engine = stack.enter_context(closing(VllmLoraEngine(f"{server.url},name=adapter")))
        self._steps = 0

    def update(self) -> tuple[float, float, float, Times]:
        """The update is the server's part: from the order to load the version to its answer."""
        self._steps += 1
        train_step(self._peft, self._steps)
        version = self._publisher.publish(self._peft, step=self._steps).wait(PATIENCE)
        self._follower.once()
        update = self._follower.take()
        assert update is not None
        with self._follower.borrow_checkpoint() as checkpoint:
            began = time.time()
            swap = self._engine.reload(checkpoint, ServedVersion("adapter", version, update.state))
        return began, swap.at - swap.paused, swap.at, {"loaded": swap.paused, "all": swap.staged + swap.paused}


def measure_updates(model: Path, count: int, scratch: Path) -> Measured:
    measured = Measured()
    scratch.mkdir()
    options = ["--max-model-len", str(LONGEST), "--max-num-seqs", str(2 * CLIENTS), "--enable-lora"]
    options += ["--max-lora-rank", str(RANK)]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with ExitStack() as stack:
        server = VLLM(scratch, model, backend=None, options=options, env=env, is_warm=False)
        stack.enter_context(running(server))
        adapter = Adapter(stack, server, model, scratch)
        streams = stack.enter_context(Streams(server))
        for index in range(count + 1):
            slots = [observe("nothing", no_update), observe("update", adapter.update)]
            measured.slots += slots if index else []
            streams.take()
        measured.ended = streams.finish()
        measured.arrivals = streams.arrivals
    return measured


def rows_of(measured: Measured) -> Iterator[Row]:
    updates = measured.times("update")
    loaded = Spread.of(updates, lambda times: 1000 * times["loaded"])
    yield Row(
        "update of the adapter in the server, ms", loaded.median, "{:.0f}", LONGEST_UPDATE, range_of(loaded, updates)
    )
    between = median(gaps_in(gaps(measured), measured.of("nothing")))
    yield Row(
        "the same / time between two tokens", loaded.median / 1000 / between, "{:.2f}", None, f"{1000 * between:.0f} ms"
    )
    rounds = list(longest_gaps(measured, "update"))
    yield ratio_row(rounds, "longest gap of other requests: update / none", "update", "nothing", Bar(2.0))
    note = f"of {measured.ended['requests']} with {measured.ended['tokens']} tokens"
    yield Row("requests with lost or repeated tokens", len(measured.ended["wrong"]), "{:.0f}", Bar(0.0), note)
    slots = [slot.times for slot in measured.slots]
    others = Spread.of(slots, itemgetter(OTHERS))
    yield Row(BUSY, others.median, "{:.2f}", None, range_of(others, slots))


if __name__ == "__main__":
    main()
