"""Measures the sizes, speed and memory of the codec on the same data, against their bars.

    python benchmarks/codec.py                  # synthetic weights, early and late in a run; takes seconds
    python benchmarks/codec.py RECORDING...     # directories that record.py wrote
    python benchmarks/codec.py --json ...       # the same as JSON

Sizes are exact and include the whole file. Time ratios compare times of the same round; the table shows the median and
the lowest and highest round (timing.py). Memory is measured in separate processes (memory.py). Every delta and anchor
is applied, and the result is compared bit for bit. A bar is judged only on the data it was set for; other figures have
no verdict.

Needs numpy, zstandard, a C compiler as `cc`, and Linux.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import peers
from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from flat_weights import FlatWeights, check_same, flat_copy
from recording import read_checkpoint, write_checkpoint
from rounds import OTHERS, Spread, Times, range_of, ratio_row
from synthetic import Stage, synthetic, synthetic_dense
from table import BUSY, Bar, Payload, Report, Row
from timing import Contest

import weightwire

# The bars on bytes per change hold for one kind of step: Qwen3-0.6B's shape at this learning rate, or synthetic weights
# that change in the same way.
QWEN3_WEIGHTS, QWEN3_LR = 596_049_920, 1e-6
BYTES_PER_CHANGE = {"early": 0.707, "late": 0.848}
# The bars on the whole file relative to the entropy limit, by model, learning rate and stage. The limit knows the rates
# of every tensor and exponent for free, so small deltas are further from it.
TIMES_LIMIT = {
    ("qwen3", 1e-6, "early"): 1.015,
    ("qwen3", 1e-6, "late"): 1.012,
    ("smollm2", 1e-6, "early"): 1.05,
    ("smollm2", 1e-6, "late"): 1.05,
    ("minilm", 1e-6, "trained"): 1.10,
    ("minilm", 1e-5, "trained"): 1.03,
}
# Smaller weights may fit into a cache, which makes memcpy much faster. If most weights change, coding dominates.
TIME_JUDGED_FROM = 4e7
TIME_JUDGED_UP_TO_CHANGED = 0.5
# With smaller checkpoints the interpreter dominates.
CHECKPOINT_JUDGED_FROM = 1e9

WORK = {
    "encode": "encode (diff, code, digest, header), one thread",
    "decode": "decode, apply and digest, one thread",
}
TIMES_MEMCPY = {"encode": Bar(3.0), "decode": Bar(2.8)}
TIMES_BASILICA = Bar(2.0, at_least=True)
TIMES_ONE_THREAD = Bar(1.5, at_least=True)
EXTRA_MEMORY = Bar(256.0)
DENSE_SPEED = {"encode": Bar(400.0, at_least=True), "decode and apply": Bar(500.0, at_least=True)}
DENSE_ROUNDS = 5
RANDOM_WEIGHTS = 1 << 24


@dataclass(frozen=True)
class Source:
    """Two consecutive checkpoint directories and facts about them."""

    title: str
    facts: dict[str, Any]
    old: Path
    new: Path
    bytes_per_change: float | None = None
    times_limit: float | None = None


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda scratch: run(arguments.recordings, scratch), as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure the codec against its bars.")
    parser.add_argument("recordings", nargs="*", type=recording_path, help="directories that record.py wrote")
    return parser.parse_args()


def run(recordings: list[Path], scratch: Path) -> Iterator[Report]:
    sources = map(recorded, recordings) if recordings else synthesised(scratch)
    for source in sources:
        yield measure(source, scratch)
    yield Report("bounds for any change", {}, 0, 0, [], bounds())


# ---- the data ----


def recorded(directory: Path) -> Source:
    facts = json.loads((directory / "recording.json").read_text())
    old, new = (directory / name for name in facts["checkpoints"][-2:])
    is_qwen3 = facts["weights"] == QWEN3_WEIGHTS and facts["lr"] == QWEN3_LR
    shape = f"{facts['weights']:,} weights in {len(facts.pop('shapes'))} tensors"
    title = f"{facts['stage']} (masters {facts['masters']}), {facts['model']}, {shape}, lr {facts['lr']:g}"
    bar = BYTES_PER_CHANGE.get(facts["stage"]) if is_qwen3 else None
    is_other = facts["model"] == "qwen3" and not is_qwen3
    limit = None if is_other else TIMES_LIMIT.get((facts["model"], facts["lr"], facts["stage"]))
    return Source(f"recorded: {title}: {directory}", facts, old, new, bar, limit)


def synthesised(scratch: Path) -> Iterator[Source]:
    for stage in get_args(Stage):
        directories = scratch / f"{stage}-old", scratch / f"{stage}-new"
        for weights, directory in zip(synthetic(stage), directories, strict=True):
            write_checkpoint(weights, directory)
        title = f"synthetic: {stage}, tensors of Qwen3-0.6B's shapes, changed as by AdamW at lr 1e-6"
        yield Source(title, {"stage": stage}, *directories, BYTES_PER_CHANGE[stage])


# ---- measurements ----


def measure(source: Source, scratch: Path) -> Report:
    old, new = flat_copy(read_checkpoint(source.old)), flat_copy(read_checkpoint(source.new))
    target = flat_copy(old.bits)
    changes = peers.measure(old.bits, new.bits)
    before = weightwire.digest(old.bf16)
    delta = weightwire.diff(old.bf16, new.bf16, before=before)
    peer_payloads = [Payload(name, size(old.bits, new.bits)) for name, size in peers.FORMATS.items()]
    anchor_size = checked_anchor(new, target)
    contest = Contest(old, new, target, before, delta.to_bytes(), (source.old, source.new), scratch)
    rounds = contest.run()
    count, raw = changes.changed, new.flat.nbytes
    judge_time = raw >= TIME_JUDGED_FROM and count <= TIME_JUDGED_UP_TO_CHANGED * changes.weights
    judge_checkpoint = raw >= CHECKPOINT_JUDGED_FROM
    return Report(
        title=f"{source.title}\n  {describe(changes)}",
        facts=source.facts | {"weights": changes.weights, "changed": count, "limit": changes.limit},
        changed=count,
        limit=changes.limit,
        payloads=[
            *peer_payloads,
            Payload("weightwire, the whole file", delta.nbytes),
            Payload("the limit, given tensor and old exponent", changes.limit),
        ],
        rows=[
            *payload_rows(delta.nbytes, changes, peer_payloads, source),
            Row("anchor / raw", anchor_size / raw, "{:.4f}", Bar(0.70)),
            Row("delta / anchor of the new weights", delta.nbytes / anchor_size, "{:.4f}", Bar(1.0)),
            *time_rows(rounds, raw, judge_time),
            *command_rows(rounds, judge_checkpoint),
            *memory_rows(source, scratch, judge_checkpoint),
        ],
    )


def describe(changes: peers.Changes) -> str:
    share, one_ulp = changes.changed / changes.weights, changes.one_ulp / changes.changed
    bits = f"{changes.position_bits / changes.changed:.2f} + {changes.step_bits / changes.changed:.2f}"
    return (
        f"{changes.weights:,} weights, {changes.changed:,} changed ({share:.3%}), {one_ulp:.1%} of them "
        f"by one ulp; limit {bits} bits of position and step per change"
    )


def payload_rows(size: int, changes: peers.Changes, others: list[Payload], source: Source) -> list[Row]:
    best = min(others, key=lambda one: one.size)
    per_change = None if source.bytes_per_change is None else Bar(source.bytes_per_change)
    limit = None if source.times_limit is None else Bar(source.times_limit)
    return [
        Row("payload, bytes per changed weight", size / changes.changed, "{:.4f}", per_change),
        Row("payload / limit", size / changes.limit, "{:.4f}", limit),
        Row("payload / smallest of the peers' formats", size / best.size, "{:.4f}", Bar(1.0), best.format),
    ]


def time_rows(rounds: list[Times], raw: int, judge: bool) -> list[Row]:
    rows = []
    for work, whole in WORK.items():
        one, two, basilica = f"{work}, one thread", f"{work}, two threads", f"{work}, Basilica"
        rows += [
            ratio_row(rounds, f"{whole}: time / memcpy", one, "memcpy", TIMES_MEMCPY[work] if judge else None),
            ratio_row(rounds, f"{work}: Basilica v3 in C / ours", basilica, one, TIMES_BASILICA if judge else None),
            ratio_row(rounds, f"{work}: one thread / two threads", one, two, TIMES_ONE_THREAD if judge else None),
        ]
    others = Spread.of(rounds, itemgetter(OTHERS))
    speed = Spread.of(rounds, lambda times: raw / times["digest"] / 1e9)
    bar = Bar(2.0, at_least=True) if judge else None
    return [
        *rows,
        Row("full state digest, one thread, GB/s", speed.median, "{:.2f}", bar, range_of(speed, rounds)),
        Row(BUSY, others.median, "{:.2f}", None, range_of(others, rounds)),
    ]


def command_rows(rounds: list[Times], judge: bool) -> list[Row]:
    """Judged against encoding on one thread, as all times are; also compared on the command's number of threads."""
    what, bar = "command line", Bar(3.0) if judge else None
    return [
        ratio_row(rounds, "`weightwire diff` / encode, one thread", what, "encode, one thread", bar),
        ratio_row(rounds, "`weightwire diff` / encode, same threads", what, "encode, threads by default", None),
    ]


def memory_rows(source: Source, scratch: Path, judge: bool) -> list[Row]:
    delta = scratch / "memory.safetensors"
    bar = EXTRA_MEMORY if judge else None
    return [
        Row("diff: extra memory, MiB", extra_memory("diff", source.old, source.new, delta), "{:.0f}", bar),
        Row("patch in place: extra memory, MiB", extra_memory("patch", source.old, delta), "{:.0f}", bar),
    ]


def extra_memory(*arguments: str | Path) -> float:
    command = [sys.executable, Path(__file__).with_name("memory.py"), *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / (1 << 20)


# ---- the worst case ----


def bounds() -> list[Row]:
    """Bounds for any change: measured on one that changes nearly everything, and on incompressible weights."""
    old, new = map(flat_copy, synthetic_dense())
    share = np.count_nonzero(old.flat != new.flat) / old.flat.size
    size, anchor_size = checked_delta(old, new), checked_anchor(new, flat_copy(old.bits))
    rng = np.random.default_rng(0)
    noise = [flat_copy({"noise": rng.integers(0, 1 << 16, RANDOM_WEIGHTS, np.uint16)}) for _ in range(2)]
    raw = noise[0].flat.nbytes
    noise_size, noise_anchor_size = checked_delta(*noise), checked_anchor(noise[1], flat_copy(noise[0].bits))
    return [
        Row(
            "synthetic, lr 1e-3: delta / anchor",
            size / anchor_size,
            "{:.4f}",
            Bar(1.0),
            f"{share:.1%} changed",
        ),
        *dense_speed(old, new),
        Row("random bits: delta / raw", noise_size / raw, "{:.6f}", Bar(1.01)),
        Row("random bits: anchor / raw", noise_anchor_size / raw, "{:.6f}", Bar(1.01)),
    ]


def dense_speed(old: FlatWeights, new: FlatWeights) -> list[Row]:
    """Bytes of weights for each second of one thread, if most of them change. The median of five rounds."""
    before, target = weightwire.digest(old.bf16), flat_copy(old.bits)
    seconds: dict[str, list[float]] = {"encode": [], "decode and apply": []}
    for _ in range(DENSE_ROUNDS):
        target.flat[:] = old.flat
        began = time.perf_counter()
        delta = weightwire.diff(old.bf16, new.bf16, before=before, threads=1)
        seconds["encode"].append(time.perf_counter() - began)
        began = time.perf_counter()
        weightwire.patch(target.bf16, delta, threads=1)
        seconds["decode and apply"].append(time.perf_counter() - began)
    return [
        Row(
            f"synthetic, lr 1e-3: {work}, one thread, MB/s",
            old.flat.nbytes / 1e6 / median(times),
            "{:.0f}",
            DENSE_SPEED[work],
            f"{old.flat.nbytes / 1e6 / max(times):.0f} to {old.flat.nbytes / 1e6 / min(times):.0f}",
        )
        for work, times in seconds.items()
    ]


def checked_delta(old: FlatWeights, new: FlatWeights) -> int:
    """The size of a delta, after checking that it turns `old` into `new`."""
    delta = weightwire.diff(old.bf16, new.bf16)
    target = flat_copy(old.bits)
    weightwire.patch(target.bf16, delta)
    check_same(target, new, "delta")
    return delta.nbytes


def checked_anchor(weights: FlatWeights, target: FlatWeights) -> int:
    """The size of an anchor, after checking that it holds the weights. Overwrites `target`."""
    anchor = weightwire.anchor(weights.bf16)
    weightwire.patch(target.bf16, anchor)
    check_same(target, weights, "anchor")
    return anchor.nbytes


if __name__ == "__main__":
    main()
