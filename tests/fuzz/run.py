"""Fuzzes decoders, guided by coverage. Without targets, all of them.

    python tests/fuzz/run.py                                   # every target, 100,000 executions each
    python tests/fuzz/run.py delta record-commit --runs 1000000
    python tests/fuzz/run.py kernel-ulp --runs -1 --seconds 600
    python tests/fuzz/run.py delta --again build/fuzz/findings/delta-crash-...
    python tests/fuzz/run.py delta --minimize                  # adds what was found to the corpus
    python tests/fuzz/run.py delta --seeds                     # adds the seeds of a new target to it

Targets `kernel-*` need clang with libFuzzer, the others Atheris: pip install -e '.[fuzz]'. A crash ends its target and
is kept in build/fuzz/findings. Put it into tests/fuzz/corpus/TARGET under a name that says what it is: every test run
replays it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from fuzz.engines import KERNEL_TARGETS, ROOT, Report, Unavailable, corpus_folder, fuzz, minimize
from fuzz.target import Target
from fuzz.targets import TARGETS

SMALL = 512  # bytes of an input that is added to the corpus


def described(name: str) -> Target:
    """The target whose inputs a target reads."""
    return TARGETS[f"block-{KERNEL_TARGETS[name]}" if name in KERNEL_TARGETS else name]


def row(report: Report) -> str:
    numbers = f"{report.executions:>12,} {report.per_second:>9,} {report.coverage:>9,} {report.features:>9,}"
    return f"{report.target:<17} {numbers} {len(report.crashes):>8}"


def run(names: list[str], work: Path, runs: int, seconds: int) -> list[Report]:
    print(f"{'target':<17} {'executions':>12} {'exec/s':>9} {'coverage':>9} {'features':>9} {'crashes':>8}", flush=True)
    reports = []
    for name in names:
        target = described(name)
        try:
            found = fuzz(name, work, largest=target.largest, runs=runs, seconds=seconds, words=target.words)
        except Unavailable as problem:
            print(f"{name:<17} skipped: {problem}", flush=True)
            continue
        print(row(found), flush=True)
        for crash in found.crashes:
            print(f"  again: python tests/fuzz/run.py {name} --again {crash}", flush=True)
        reports.append(found)
    return reports


def write_seeds(name: str) -> None:
    folder, target = corpus_folder(name), described(name)
    folder.mkdir(parents=True, exist_ok=True)
    for data in target.seeds():
        if len(data) <= target.largest:
            (folder / f"seed-{hashlib.sha256(data).hexdigest()[:12]}.input").write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz decoders, guided by coverage.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join([*TARGETS, *KERNEL_TARGETS]))
    parser.add_argument("--runs", type=int, default=100_000, help="executions of each target; -1 for no limit")
    parser.add_argument("--seconds", type=int, default=0, help="time for each target")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "fuzz", help="where inputs and crashes are kept")
    parser.add_argument("--again", type=Path, nargs="+", help="run these inputs only, without an engine")
    parser.add_argument("--minimize", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument("--seeds", action="store_true", help="write the seeds to the corpus")
    arguments = parser.parse_args()
    names = arguments.targets or [*TARGETS, *KERNEL_TARGETS]
    if unknown := set(names) - {*TARGETS, *KERNEL_TARGETS}:
        parser.error(f"unknown target: {', '.join(sorted(unknown))}")
    if arguments.again:
        for path in arguments.again:
            print(f"{path}: {described(names[0]).check(path.read_bytes())}")
    elif arguments.seeds:
        for name in names:
            write_seeds(name)
    elif arguments.minimize:
        for name in names:
            print(f"{name}: {minimize(name, arguments.work, min(SMALL, described(name).largest))} inputs added")
    elif any(report.crashes for report in run(names, arguments.work, arguments.runs, arguments.seconds)):
        sys.exit(1)


if __name__ == "__main__":
    main()
