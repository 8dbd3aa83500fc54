"""Measures what many small tensors cost: the same weights, cut into 70,000 tensors of 64x64 and into 300 large ones.

    python benchmarks/many_tensors.py                    # 573 MB, as a mixture of experts has them
    python benchmarks/many_tensors.py --tensors 7000     # a tenth
    python benchmarks/many_tensors.py --json

Both runs publish the same steps in turns: in a step, 0.33% of all weights move by one unit in the last place. The
bucket is a directory. The first step of a run does not count. At the end both are followed from nothing, which fetches
the first version and all deltas, and the result is compared bit for bit. Needs numpy and Linux.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from arguments import benchmark_parser
from benchmark_run import run_benchmark
from flat_weights import FlatWeights, check_same, flat_copy
from process_tree import processor_seconds_of_others
from rounds import OTHERS, Round, Spread, Times, range_of
from synthetic import gaussian_weights
from table import BUSY, Bar, Report, Row

from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher

SIDE = 64
LARGE = 300
CHANGED = 0.0033
BARS = {"capture": Bar(3.0), "publish": Bar(3.0), "follow": Bar(3.0), "bytes": Bar(1.5)}
# With fewer tensors, what a version costs whatever it holds dominates.
JUDGED_FROM = 70_000
TITLES = {
    "capture": "publish() returns",
    "publish": "publish() until committed",
    "follow": "follow from nothing, first version and deltas",
}


@dataclass(frozen=True)
class Side:
    """One of the two runs. `weights` are views of the trainer's memory."""

    name: str
    weights: FlatWeights
    directory: Path

    @property
    def bucket(self) -> Path:
        return self.directory / "bucket"


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: [measure(arguments.tensors, arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure what many small tensors cost, against few large ones of the same bytes.")
    parser.add_argument("--tensors", type=int, default=JUDGED_FROM, help="small tensors (default: 70,000)")
    parser.add_argument("--rounds", type=int, default=3, help="steps that count (default: 3)")
    return parser.parse_args()


def measure(tensors: int, rounds: int, scratch: Path) -> Report:
    small = Side("small", cut_small(tensors), scratch / "small")
    large = Side("large", cut_large(small.weights), scratch / "large")
    times = publish_steps(small, large, rounds)
    follow(small, large, times)
    judge = tensors >= JUDGED_FROM
    rows = [time_row(what, times, judge) for what in TITLES]
    rows += [bytes_row(small, large, judge), run_row(small, large)]
    rows.append(Row(BUSY, Spread.of(times, lambda one: one[OTHERS]).median, "{:.2f}", None))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    flat = small.weights.flat
    title = (
        f"{flat.nbytes / 1e6:.0f} MB of bf16: {len(small.weights.bits):,} tensors against {len(large.weights.bits)}; "
        f"{CHANGED:.2%} change\n  load average at the end {load}"
    )
    return Report(title, {"tensors": tensors, "rounds": rounds}, 0, 0, [], rows)


# ---- weights ----


def cut_small(count: int) -> FlatWeights:
    """Named as the experts of a large mixture."""
    flat = gaussian_weights((count * SIDE * SIDE // 1024, 1024), np.random.default_rng(15)).reshape(-1)
    pieces = flat.reshape(count, SIDE, SIDE)
    kinds = ("gate_proj", "up_proj", "down_proj")
    names = (
        f"model.layers.{index // 1152}.mlp.experts.{index // 3 % 384}.{kinds[index % 3]}.weight"
        for index in range(count)
    )
    return FlatWeights(flat, dict(zip(names, pieces, strict=True)))


def cut_large(same: FlatWeights) -> FlatWeights:
    """Views of the same weights, in tensors of nearly equal size."""
    rows = same.flat.reshape(-1, 1024)
    ends = np.linspace(0, len(rows), LARGE + 1).astype(int).tolist()
    names = [f"model.layers.{index // 10}.mlp.{index % 10}.weight" for index in range(LARGE)]
    bits = {name: rows[begin:end] for name, (begin, end) in zip(names, pairwise(ends), strict=True)}
    return FlatWeights(same.flat, bits)


def step(weights: FlatWeights, rng: np.random.Generator) -> None:
    flat = weights.flat
    at = np.unique(rng.integers(0, flat.size, round(CHANGED * flat.size)))
    flat[at] += rng.choice(np.array([1, 0xFFFF], np.uint16), at.size)


# ---- times ----


def publish_steps(small: Side, large: Side, rounds: int) -> list[Times]:
    rng, times = np.random.default_rng(1), []
    with publisher(small) as of_small, publisher(large) as of_large:
        for number in range(rounds + 2):
            if number:
                step(small.weights, rng)
            started, busy_before = time.perf_counter(), processor_seconds_of_others()
            this = publish(small, of_small) | publish(large, of_large)
            others = (processor_seconds_of_others() - busy_before) / (time.perf_counter() - started)
            times.append(this | {OTHERS: others})
    return times[2:]  # the first version holds all weights; the first delta warms up


def publisher(side: Side) -> Publisher:
    return Publisher(side.bucket, files={}, anchor_every=1000)


def publish(side: Side, to: Publisher) -> Times:
    this, weights = Round(), side.weights.bf16

    def until_committed() -> None:
        this.time(f"{side.name} capture", lambda: to.publish(weights))
        to.wait()

    this.time(f"{side.name} publish", until_committed)
    return this.times


def follow(small: Side, large: Side, times: list[Times]) -> None:
    this = Round()
    for side in (small, large):
        with Follower(side.bucket, into=side.directory / "replica") as follower:
            this.time(f"{side.name} follow", follower.once)
            made = flat_copy({name: follower.replica.weights[name].bits for name in side.weights.bits})
        check_same(made, side.weights, f"{len(side.weights.bits):,} tensors")
    for one in times:
        one.update(this.times)


# ---- rows ----


def time_row(what: str, times: list[Times], judge: bool) -> Row:
    spread = Spread.of(times, lambda one: one[f"small {what}"] / one[f"large {what}"])
    seconds = [Spread.of(times, lambda one, side=side: one[f"{side} {what}"]).median for side in ("small", "large")]
    note = f"{range_of(spread, times)}; {seconds[0]:.3f} / {seconds[1]:.3f} s"
    return Row(f"{TITLES[what]}: small / large", spread.median, "{:.2f}", BARS[what] if judge else None, note)


def bytes_row(small: Side, large: Side, judge: bool) -> Row:
    sizes = [largest(side.bucket / "deltas") for side in (small, large)]
    note = f"{sizes[0]:,} / {sizes[1]:,} bytes"
    return Row("delta bytes: small / large", sizes[0] / sizes[1], "{:.2f}", BARS["bytes"] if judge else None, note)


def largest(folder: Path) -> int:
    """The bytes of the largest version."""
    return max(sum(file.stat().st_size for file in version.iterdir()) for version in folder.iterdir())


def run_row(small: Side, large: Side) -> Row:
    sizes = [(side.bucket / "run.json").stat().st_size for side in (small, large)]
    return Row("run.json bytes: small", sizes[0], "{:,.0f}", None, f"large: {sizes[1]:,}")


if __name__ == "__main__":
    main()
