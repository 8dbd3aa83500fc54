"""Measures the longest gap between two tokens that clients of a vLLM server see: without an update, and with one.

    python benchmarks/cache_policy.py              # synthetic steps of Qwen3-0.6B's shape
    python benchmarks/cache_policy.py RECORDING    # a directory that record.py wrote
    python benchmarks/cache_policy.py --json ...   # the same as JSON

As in pause.py, a real vLLM runs on this machine's CPU, and clients stream completions from it all the time, here with
prompts of 1000 tokens. `follow --cache keep` and `--cache flush` each get a server of their own. In every round nothing
happens for some seconds, and then a step is published. The first round does not count.

A client that starts its next request delays the others in any case: the server computes its prompt. Such gaps do not
count.

Needs torch, transformers, vLLM (built for CPUs), 12 GB of memory and Linux.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from operator import itemgetter
from pathlib import Path

from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from pause import CLIENTS, Ours, Proof, Streams, no_update, observe
from rounds import OTHERS, Spread, range_of, ratio_row
from stream_gaps import Measured, longest_gaps
from table import BUSY, Bar, Report, Row
from training import open_training
from vllm_server import make_model, serving

PROMPT, TOKENS = 1000, 200
BARS = {"keep": Bar(2.0), "flush": None}


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: [measure(arguments.recording, arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure the longest gap that clients of a vLLM server see, by cache policy.")
    parser.add_argument(
        "recording", nargs="?", type=recording_path, help="a directory that record.py wrote, of a Qwen3 model"
    )
    parser.add_argument("--rounds", type=int, default=5, help="updates for each policy (default: 5)")
    return parser.parse_args()


def measure(recording: Path | None, count: int, scratch: Path) -> Report:
    training = open_training(recording, scratch)
    title, facts = training.title, training.shown_facts
    checkpoints = [training.directory / name for name in facts["checkpoints"]]
    del training
    model, load = make_model(checkpoints[0], scratch / "model"), os.getloadavg()[0]
    rows = []
    for cache, bar in BARS.items():
        measured = measure_policy(cache, model, checkpoints, count, scratch / cache)
        rows += policy_rows(cache, measured, bar)
    title = f"{title}\n  load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
    return Report(title, facts, 0, 0, [], rows)


def measure_policy(cache: str, model: Path, checkpoints: list[Path], count: int, scratch: Path) -> Measured:
    measured = Measured()
    with ExitStack() as stack:
        server = stack.enter_context(serving(model, scratch, "weightwire", 2 * CLIENTS, PROMPT + TOKENS))
        proof = Proof(server, checkpoints[0])
        ours = Ours(stack, server, checkpoints[0], scratch, cache)
        streams = stack.enter_context(Streams(server, TOKENS, PROMPT))
        steps = cycle([*checkpoints[1:], *reversed(checkpoints[:-1])])
        for index, after in zip(range(count + 1), steps, strict=False):
            slots = [observe("nothing", no_update), observe(cache, partial(ours.update, after))]
            proof.check(after, cache)
            measured.slots += slots if index else []
            streams.take()
        measured.ended = streams.finish()
        measured.arrivals = streams.arrivals
    return measured


def policy_rows(cache: str, measured: Measured, bar: Bar | None) -> Iterator[Row]:
    rounds = list(longest_gaps(measured, cache))
    yield ratio_row(rounds, f"longest gap: --cache {cache} / no update", cache, "nothing", bar)
    pause = Spread.of(measured.times(cache), lambda times: 1000 * times["ordered"])
    yield Row(f"--cache {cache}: from the pause request on, ms", pause.median, "{:.0f}", None, range_of(pause, rounds))
    lost = measured.ended["wrong"]
    note = f"of {measured.ended['requests']} with {measured.ended['tokens']} tokens"
    yield Row(f"--cache {cache}: requests with lost or repeated tokens", len(lost), "{:.0f}", Bar(0.0), note)
    slots = [slot.times for slot in measured.slots]
    others = Spread.of(slots, itemgetter(OTHERS))
    yield Row(f"--cache {cache}: {BUSY}", others.median, "{:.2f}", None, range_of(others, slots))


if __name__ == "__main__":
    main()
