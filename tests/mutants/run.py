"""Runs the simulation and the tests against every mutant, and prints who noticed it.

    python tests/mutants/run.py                             # all: simulation, then the tests of the room
    python tests/mutants/run.py --simulation-only           # those of protocol and replica, without the tests
    python tests/mutants/run.py --only "leases ignored"

A mutant that survives is a missing fault in tests/faults, or a missing test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to run it as a script

from mutants.catalogue import MUTANTS, SIMULATED
from mutants.mutant import SOURCE, Mutant

TESTS = Path(__file__).resolve().parent.parent

_SEED = re.compile(r"seed (\d+): (.*)")
_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """Who noticed a mutant: the first seed with its violation, and the first test. None: not noticed, or not tried."""

    mutant: Mutant
    seed: int | None
    violation: str
    test: str | None
    seconds: float

    @property
    def survived(self) -> bool:
        return self.seed is None and self.test is None

    @property
    def row(self) -> str:
        simulation = "-" if self.seed is None else f"seed {self.seed}"
        test = "-" if self.test is None else self.test.rsplit("/", 1)[-1]
        mark = "SURVIVED" if self.survived else self.violation[:90]
        return f"{self.mutant.name:45} | {simulation:9} | {test:60} | {mark}"


def try_mutant(mutant: Mutant, seeds: int, *, simulation_only: bool, tests_only: bool = False) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weightwire-mutant-") as scratch:
        source = Path(scratch, "src")
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("*.egg-info"))
        mutant.apply(source)
        seed, violation = (None, "") if tests_only else _simulate(source, seeds)
        test = None if simulation_only else _test(source, mutant.tests)
    return Verdict(mutant, seed, violation, test, time.monotonic() - began)


def _simulate(source: Path, seeds: int) -> tuple[int | None, str]:
    command = [str(TESTS / "faults/simulation.py"), "--stop", "--processes", "1", "--seeds", str(seeds)]
    printed = _run(source, command)
    if "seeds per minute" not in printed:
        raise RuntimeError(f"the simulation did not run: {printed[-2000:]}")
    found = _SEED.search(printed)
    return (int(found[1]), found[2]) if found else (None, "")


def _test(source: Path, tests: Sequence[str]) -> str | None:
    options = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    found = _TEST.search(_run(source, options))
    return found[1] if found else None


def _run(source: Path, command: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=TESTS.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=sorted(MUTANTS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--simulation-only", action="store_true")
    parser.add_argument("--tests-only", action="store_true")
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    names = args.only or (SIMULATED if args.simulation_only else MUTANTS)
    chosen = [MUTANTS[name] for name in names]

    def judge(mutant: Mutant) -> Verdict:
        return try_mutant(mutant, args.seeds, simulation_only=args.simulation_only, tests_only=args.tests_only)

    verdicts = []
    with ThreadPoolExecutor(args.parallel) as pool:
        for done in as_completed([pool.submit(judge, one) for one in chosen]):
            verdict = done.result()
            verdicts.append(verdict)
            print(verdict.row, f"({verdict.seconds:.0f} s)", flush=True)
    by_seed = sum(verdict.seed is not None for verdict in verdicts)
    by_test = sum(verdict.test is not None for verdict in verdicts)
    lost = [verdict.mutant.name for verdict in verdicts if verdict.survived]
    print(f"{len(verdicts)} mutants: {by_seed} noticed by the simulation, {by_test} by tests, {len(lost)} survived")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
