"""One target under Atheris, in its own process: `run.py` starts it.

    python tests/fuzz/atheris_child.py TARGET [libFuzzer options] CORPUS...

Atheris instruments the bytecode of weightwire and of the HTTP parser, so an input that reaches new code is kept. Half
of the mutations are those of the target: bytes that Atheris changes at random seldom get past a JSON parser or an
entropy coder.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from support.sanitizers import use_kernel

if "WEIGHTWIRE_FUZZ_KERNEL" in os.environ:
    use_kernel(os.environ["WEIGHTWIRE_FUZZ_KERNEL"])

with atheris.instrument_imports(include=["weightwire", "http.server", "http.client", "email"]):
    from fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            changed: bytes = atheris.Mutate(data, most)
            return changed
        return target.mutate(data, rng)[:most]

    atheris.Setup(sys.argv, target.check, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
