"""Measures how long a trainer waits for publish() and how much memory a publisher needs, against their bars.

    python benchmarks/publish.py                # synthetic steps of Qwen3-0.6B's shape
    python benchmarks/publish.py RECORDING      # a directory that record.py wrote
    python benchmarks/publish.py --json ...     # the same as JSON

In every round the trainer takes a step, "trains" for a while, copies its weights into warm memory and publishes them.
The copy, with np.copyto on one core, is the memcpy that times are compared with. The bucket is a directory. The run
starts from a base, so no scene begins with an anchor. The first round of a scene does not count. At the end the
published weights are restored and compared bit for bit.

Memory is measured in a separate process (memory.py), including the first publish and an anchor. Needs numpy and Linux.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import numpy as np
from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from flat_weights import FlatWeights, check_same, flat_copy
from process_tree import processor_seconds_of_others
from rounds import OTHERS, Round, Spread, Times, ratio_row
from slow_bucket import SlowBucket
from table import Bar, Report, Row
from training import Training, open_training

from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher

TIMES_MEMCPY = Bar(2.0)
# With less than a gigabyte of weights, threads and the interpreter dominate.
JUDGED_FROM = 1e9
MEMORY = {"publish": Bar(2.0), "publish-blocking": Bar(1.0)}


@dataclass(frozen=True)
class Scene:
    """How the trainer behaves between two publishes, and how fast the bucket is."""

    title: str
    seconds: float
    busy: bool = False
    bytes_per_second: float | None = None
    again: bool = False  # publishes twice in a row and measures the second publish
    blocking: bool = False
    judged: bool = True

    def bucket(self, directory: Path) -> Bucket:
        bucket = open_bucket(directory)
        return bucket if self.bytes_per_second is None else SlowBucket(bucket, self.bytes_per_second)


SCENES = [
    Scene("steps of 1 s, CPU idle", 1.0),
    Scene("steps of 1 s, one core busy", 1.0, busy=True),
    Scene("steps of 1 s, bucket at 10 MB/s", 1.0, bytes_per_second=10e6),
    Scene("steps of 1 s, bucket at 1 MB/s", 1.0, bytes_per_second=1e6),
    Scene("right after another publish", 1.0, again=True, judged=False),
    Scene("blocking, until committed", 1.0, blocking=True, judged=False),
]


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: [measure(arguments.recording, arguments.rounds, scratch)], as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure how long a trainer waits for publish() and how much memory a publisher needs.")
    parser.add_argument("recording", nargs="?", type=recording_path, help="a directory that record.py wrote")
    parser.add_argument("--rounds", type=int, default=9, help="publishes per scene (default: 9)")
    return parser.parse_args()


def measure(recording: Path | None, rounds: int, scratch: Path) -> Report:
    training = open_training(recording, scratch)
    warm, judge = flat_copy(training.live.bits), training.live.flat.nbytes >= JUDGED_FROM
    rows = []
    for index, scene in enumerate(SCENES):
        rows += scene_rows(scene, judge, *play(scene, training, warm, rounds, scratch / f"scene-{index}"))
    rows += memory_rows(training, judge, scratch)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return Report(f"{training.title}\n  load average at the end {load}", training.shown_facts, 0, 0, [], rows)


# ---- time ----


def play(scene: Scene, training: Training, warm: FlatWeights, count: int, scratch: Path) -> tuple[list[Times], int]:
    """The times of all rounds but the first, and the number of versions made."""
    bucket, weights = scene.bucket(scratch / "bucket"), training.live.bf16
    base = flat_copy(training.live.bits)
    rounds = []
    with Publisher(bucket, base=base.bf16, files={}, blocking=scene.blocking) as publisher:
        before = publisher.version
        for _ in range(count + 1):
            rounds.append(play_round(scene, training, warm, publisher))
        publisher.wait()
        versions = (publisher.version or 0) - (before or 0)
    with Follower(scratch / "bucket", into=scratch / "replica", base=base.bf16) as follower:
        follower.once()
        made = flat_copy({name: follower.replica.weights[name].bits for name in weights})
    check_same(made, training.live, scene.title)
    return rounds[1:], versions


def play_round(scene: Scene, training: Training, warm: FlatWeights, publisher: Publisher) -> Times:
    this, weights = Round(), training.live.bf16
    started, busy_before = time.perf_counter(), processor_seconds_of_others()
    training.step()
    train(scene)
    this.time("memcpy", lambda: np.copyto(warm.flat, training.live.flat))
    if scene.again:
        publisher.publish(weights)
    this.time("publish", lambda: publisher.publish(weights))
    if scene.again:
        publisher.wait()
    others = (processor_seconds_of_others() - busy_before) / (time.perf_counter() - started)
    return this.times | {OTHERS: others}


def train(scene: Scene) -> None:
    """Waits like a trainer that works on a GPU, or keeps one core of this machine busy."""
    until = time.perf_counter() + scene.seconds
    if not scene.busy:
        time.sleep(scene.seconds)
        return
    some = np.ones(1 << 16, np.float32)
    while time.perf_counter() < until:
        np.multiply(some, np.float32(1.0), out=some)


def scene_rows(scene: Scene, judge: bool, rounds: list[Times], versions: int) -> list[Row]:
    bar = TIMES_MEMCPY if judge and scene.judged else None
    row = ratio_row(rounds, f"{scene.title}: publish() / memcpy", "publish", "memcpy", bar)
    others = Spread.of(rounds, itemgetter(OTHERS))
    made = f"{versions} versions from {(len(rounds) + 1) * (1 + scene.again)} publishes"
    worst = Spread.of(rounds, itemgetter("publish")).high
    note = f"{row.note}, longest {1000 * worst:.0f} ms; {made}; {others.median:.2f} cores busy with other processes"
    return [replace(row, note=note)]


# ---- memory ----


def memory_rows(training: Training, judge: bool, scratch: Path) -> list[Row]:
    return [memory_row(what, bar, training, judge, scratch / what) for what, bar in MEMORY.items()]


def memory_row(what: str, bar: Bar, training: Training, judge: bool, bucket: Path) -> Row:
    script, nbytes = Path(__file__).with_name("memory.py"), training.live.flat.nbytes
    command: list[str | Path] = [sys.executable, script, what, training.directory, bucket]
    extra = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    note = f"{(extra - bar.value * nbytes) / (1 << 20):+.0f} MiB"
    return Row(f"{what}: (memory - delta) / weights", extra / nbytes, "{:.3f}", bar if judge else None, note)


if __name__ == "__main__":
    main()
