"""Damages golden files and their blocks, and decodes them with a kernel under sanitizers. Needs only a C compiler.

    python tests/fuzz/golden_mutations.py --count 5000 --seed 1           # with the kernel under ASan and UBSan
    python tests/fuzz/golden_mutations.py --count 1000 --seed 1 --spec    # also NumPy, which must agree
    python tests/fuzz/golden_mutations.py --seed 1 --only 4711            # one mutation again
    python tests/fuzz/golden_mutations.py --count 5000 --collect DIR      # keep the smallest input for every reason

Every outcome must be a result with the right digest or a typed error, and nothing else may change. Most mutations are
of blocks, and half of these change fields of a well-formed block (crafted_files.py): random damage of a file mostly
hits its JSON. Mutation i of a seed is always the same.

The kernel is compiled into a temporary directory and runs in a separate process with the sanitizers preloaded. The
first read or write outside a buffer ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from support.sanitizers import build_kernel, use_kernel, watched_environment

if "WEIGHTWIRE_FUZZ_KERNEL" in os.environ:
    use_kernel(os.environ["WEIGHTWIRE_FUZZ_KERNEL"])

from fuzz.blocks import Block, File, golden_blocks, golden_files
from fuzz.mutations import damage, damage_file, lie
from fuzz.target import Failure
from fuzz.verdicts import judge_block, judge_file
from support.samples import vector_widths

SECONDS = 20  # seconds for one mutation; the slowest takes a fraction of one


@dataclass
class Run:
    """The mutations of one seed, and their verdicts."""

    seed: int
    compare: bool
    collect: Path | None

    def __post_init__(self) -> None:
        self.blocks = golden_blocks(8_000 if self.compare else 80_000)
        self.files = [] if self.compare else golden_files()
        self.widths = vector_widths()
        self.counts: Counter[str] = Counter()

    def mutation(self, index: int) -> Block | tuple[File, bytes]:
        rng = random.Random(f"{self.seed}:{index}")
        if self.files and rng.random() < 0.1:
            file = rng.choice(self.files)
            return file, damage_file(file, rng, rng.choice(self.files))
        block = rng.choice(self.blocks)
        other = rng.choice(self.blocks).data
        data = lie(block, rng) if rng.random() < 0.5 else damage(block.data, rng, other)
        block = replace(block, data=data)
        if block.old is not None and rng.random() < 0.1:
            block = replace(block, old=rng.randbytes(len(block.old)))
        return block

    def judge(self, index: int) -> str:
        mutated = self.mutation(index)
        if isinstance(mutated, Block):
            verdict = judge_block(mutated, self.widths, self.compare)
            if self.collect:
                keep_smallest(self.collect, verdict, mutated)
        else:
            verdict = "file: " + judge_file(*mutated)
        self.counts[verdict] += 1
        return verdict


def keep_smallest(directory: Path, verdict: str, block: Block) -> None:
    """One input for every verdict and encoding."""
    encoding = {1: "ulp", 2: "dense", 3: "full"}.get(block.data[0] & 3, "none") if block.data else "none"
    path = directory / f"{encoding}-{verdict.replace(' ', '-')}.json"
    text = replace(block, name=verdict).to_json()
    if not path.exists() or len(text) < path.stat().st_size:
        path.write_text(text)


def work(arguments: argparse.Namespace) -> None:
    """Runs in the process with sanitizers. A file records the current mutation in case it crashes."""
    run = Run(arguments.seed, arguments.spec, arguments.collect)
    signal.signal(signal.SIGPROF, too_long)
    indices = [arguments.only] if arguments.only is not None else range(arguments.count)
    with Path(arguments.at).open("r+b", buffering=0) as at:
        for index in indices:
            os.pwrite(at.fileno(), index.to_bytes(8, "little"), 0)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            verdict = run.judge(index)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if arguments.only is not None:
        print(verdict, file=sys.stderr)
    print(json.dumps(dict(run.counts.most_common()), indent=1))


def too_long(*_: object) -> None:
    raise Failure(f"took more than {SECONDS} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage golden files and see what becomes of them.")
    parser.add_argument("--count", type=int, default=5000, help="how many mutations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this mutation only")
    parser.add_argument("--spec", action="store_true", help="blocks through NumPy too: the verdict must be the same")
    parser.add_argument("--collect", type=Path, help="keep the smallest input for every verdict in this directory")
    parser.add_argument("--kernel", type=Path, help="a kernel that was built before")
    parser.add_argument("--at", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.at:
        work(arguments)
        return
    if arguments.collect:
        arguments.collect.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weightwire-fuzz-") as directory:
        at = Path(directory, "at")
        at.write_bytes(bytes(8))
        kernel = arguments.kernel or build_kernel(Path(directory))
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--at", str(at)]
        code = subprocess.run(command, env=watched_environment(kernel), check=False).returncode
        if code:
            index = int.from_bytes(at.read_bytes(), "little")
            options = f"--seed {arguments.seed} --only {index}{' --spec' * arguments.spec}"
            again = f"python tests/fuzz/golden_mutations.py {options}"
            raise SystemExit(f"mutation {index} of seed {arguments.seed} failed ({code}). Again: {again}")


if __name__ == "__main__":
    main()
