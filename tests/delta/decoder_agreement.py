"""Compares `weightwire patch` with the second decoder, on valid and on damaged files.

    python tests/delta/decoder_agreement.py --files 10000 --seed 0

`second_decoder.py` was written from docs/FORMAT.md alone. Each file describes a random change of random tensors, of all
dtypes. A damaged copy of it has bytes changed, or fields of its index or of a block, with hashes that are right again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to run it as a script

from delta.second_block_decoder import Invalid
from delta.second_decoder import Weight, apply
from fuzz.blocks import File
from fuzz.mutations import damage_file
from support.samples import BASES, CHANGES, base, change
from weightwire import Delta, Tensor, anchor, diff, patch
from weightwire.errors import WeightwireError
from weightwire.weights import Weights, read_weights
from weightwire.weights.dtypes import DTYPES

_FEW = ("BF16", "F32", "F8_E4M3", "I32", "U8")


# --- files -------------------------------------------------------------------------------------------------------


def make_file(seed: int) -> File:
    """A delta or an anchor of some tensors: alone, in stacks, added, removed, or of other rows, shapes and dtypes."""
    rng = random.Random(seed)
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    for index in range(rng.randint(1, 4)):
        dtype = DTYPES[rng.choice(_FEW) if rng.random() < 0.7 else rng.choice(list(DTYPES))]
        shape, line = _shape(rng)
        count = int(np.prod(shape)) * dtype.bits // 8 // dtype.unit
        for member in range(rng.choice((1, 1, 2, 5))):
            name, what = f"layer.{index}.{member}.{rng.choice('wéb')}", rng.random()
            units = base(dtype, count, rng.choice(BASES), rng.getrandbits(20))
            how, now = rng.choice(CHANGES), units
            if count and what > 0.15:
                now = change(units, dtype, how, rng.getrandbits(20), line)
            if what > 0.03:
                old[name] = (dtype.name, shape, units)
            if what < 0.97:
                new[name] = (dtype.name, shape, now)
    data = _encoded(old, new, rng).to_bytes()
    return File("random", data, old)


def _shape(rng: random.Random) -> tuple[tuple[int, ...], int]:
    """A shape, and its lines, if it has any. All have an even number of elements, for dtypes of 4 bits."""
    kind = rng.randrange(6)
    if kind == 0:
        return (rng.choice((8, 24, 200, 5000)),), 0
    if kind == 1:
        return (rng.randint(1, 30), 64), 64
    if kind == 2:
        return (4, rng.randint(1, 9), 72), 72
    if kind == 3:
        return (rng.randint(1, 40), 12), 0
    return ((0, 8), 0) if kind == 4 and rng.random() < 0.2 else ((8, 16), 0)


def _encoded(old: dict[str, Any], new: dict[str, Any], rng: random.Random) -> Delta:
    what = rng.random()
    if what < 0.1:
        return anchor(new)
    if what < 0.2:
        return diff(old, new, coo=True)
    if what < 0.35:
        both = [name for name in old if name in new and old[name][:2] == new[name][:2]]
        halves = _halves({name: old[name] for name in both})
        if halves:
            return diff(halves, _halves({name: new[name] for name in both}))
    return diff(old, new)


def _halves(weights: dict[str, Any]) -> Weights:
    """The upper half of the rows of each tensor, as a rank of a sharded trainer holds them."""
    halves: dict[str, Tensor] = {}
    for name, tensor in read_weights(weights).items():
        rows = tensor.shape[0]
        if rows < 2 or tensor.dtype.bits < 8:
            continue
        units = tensor.bits[: tensor.bits.size // rows * (rows // 2)]
        halves[name] = Tensor(tensor.dtype, tensor.shape, units, (0, rows // 2))
    return halves


# --- verdicts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What both said of a file: `accepted`, `refused` or `disagree`."""

    outcome: str
    ours: str
    theirs: str


def comparisons(seed: int) -> Iterator[Comparison]:
    """Of a valid file, and of a damaged copy."""
    file, rng = make_file(seed), random.Random(f"damage {seed}")
    yield compare(file.data, file.old)
    yield compare(damage_file(file, rng, file), file.old)


def compare(data: bytes, old: dict[str, Any]) -> Comparison:
    ours = _outcome(lambda: _weights(patch(old, Delta.from_bytes(data), copy=True)), WeightwireError)
    theirs = _outcome(lambda: apply(data, _weights(old)), Invalid)
    if isinstance(ours, str) != isinstance(theirs, str):
        return Comparison("disagree", _text(ours), _text(theirs))
    if isinstance(ours, str):
        return Comparison("refused", ours, _text(theirs))
    return Comparison("accepted" if ours == theirs else "disagree", _text(ours), _text(theirs))


def _outcome(decode: Callable[[], dict[str, Weight]], refusal: type[Exception]) -> dict[str, Weight] | str:
    try:
        return decode()
    except refusal as problem:
        return str(problem) or type(problem).__name__


def _text(outcome: dict[str, Weight] | str) -> str:
    return outcome if isinstance(outcome, str) else "accepted"


def _weights(weights: Any) -> dict[str, Weight]:
    return {
        name: Weight(tensor.dtype.name, tensor.shape, tensor.bits.tobytes())
        for name, tensor in read_weights(weights).items()
    }


# --- running it --------------------------------------------------------------------------------------------------


def outcomes(seed: int) -> list[Comparison]:
    return list(comparisons(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first file")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    with ProcessPoolExecutor() as pool:
        seeds = range(args.seed, args.seed + args.files)
        for seed, found in zip(seeds, pool.map(partial(outcomes), seeds, chunksize=20), strict=True):
            for kind, one in zip(("valid", "damaged"), found, strict=True):
                counts[f"{kind}: {one.outcome}"] += 1
                if one.outcome == "disagree" or (kind == "valid" and one.outcome != "accepted"):
                    print(f"seed {seed}, {kind}: ours: {one.ours}; theirs: {one.theirs}")
    for outcome, count in sorted(counts.items()):
        print(f"{outcome}: {count}")
    sys.exit(any("disagree" in outcome or outcome == "valid: refused" for outcome in counts))


if __name__ == "__main__":
    main()
