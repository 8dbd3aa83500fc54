"""Golden files: one delta for every encoding, from inputs made with integer arithmetic.

    python tests/golden/make.py                 # make missing files, list those that differ
    python tests/golden/make.py --overwrite     # for a new format version: make all files again

Deltas outlive releases. If a file differs from the output of the code, the code is wrong, unless no release reads or
wrote the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402

from support.samples import base, below, change, special, units_of, words  # noqa: E402
from weightwire import Delta, Tensor, anchor, diff, digest  # noqa: E402
from weightwire.codec import block_codec, numpy_kernel  # noqa: E402
from weightwire.codec.block_layout import BLOCK  # noqa: E402
from weightwire.weights.dtypes import DTYPES, Dtype  # noqa: E402

Weights = dict[str, Any]
Case = tuple[Weights, Weights, Callable[[Weights, Weights], Delta]]

BF16, F16, F32, F64, E4M3, U8, U16, U64, I32 = (
    DTYPES[name] for name in ("BF16", "F16", "F32", "F64", "F8_E4M3", "U8", "U16", "U64", "I32")
)


def one(dtype: Dtype, shape: tuple[int, ...], units: Any) -> Weights:
    return {"x": (dtype.name, shape, bytearray(units.tobytes()))}


def changed(dtype: Dtype, shape: tuple[int, ...], kind: str, how: str, line: int = 0) -> Case:
    """One tensor with one kind of change."""
    old = base(dtype, int(np.prod(shape)), kind)
    return one(dtype, shape, old), one(dtype, shape, change(old, dtype, how, line=line)), diff


def every_dtype(how: str) -> Case:
    """One tensor of every dtype, 12 rows of 96 units."""
    old, new = {}, {}
    for name, dtype in DTYPES.items():
        units = base(dtype, 12 * 96, seed=dtype.code)
        shape = (12, 96 * 8 * dtype.unit // dtype.bits)
        old[name] = (name, shape, bytearray(units.tobytes()))
        new[name] = (name, shape, bytearray(change(units, dtype, how, seed=dtype.code, line=96).tobytes()))
    return old, new, diff


def all_steps() -> Case:
    """Steps by every power of two and its neighbours, in both directions, from any value."""
    old, new = {}, {}
    for dtype in (U64, F64, F32, BF16, E4M3):
        powers = [2**k + d for k in range(8 * dtype.unit) for d in (-1, 0, 1)]
        steps = units_of([s % 2**64 for p in powers for s in (p, -p)], dtype)
        units = base(dtype, len(steps))
        old[dtype.name] = (dtype.name, (len(steps),), bytearray(units.tobytes()))
        new[dtype.name] = (dtype.name, (len(steps),), bytearray((units + steps).tobytes()))
    return old, new, diff


def sparse(case: Case, every: int) -> Case:
    """A case in which only every so-many'th unit changes, so that its blocks are `ulp`."""
    old, new, how = case
    kept: Weights = {}
    for name, (dtype, shape, data) in old.items():
        was, now = (np.frombuffer(bytes(one), f"<u{DTYPES[dtype].unit}") for one in (data, new[name][2]))
        kept[name] = (dtype, shape, bytearray(np.where(np.arange(len(was)) % every, was, now).tobytes()))
    return old, kept, how


def complement() -> Case:
    """Most members of one class change, and none of another."""
    old = np.repeat(np.array([125, 115], "<u2") << np.uint16(7), [20_000, 2000])
    moved = change(old, BF16, "most")
    moved[:20_000] = old[:20_000]
    return one(BF16, old.shape, old), one(BF16, old.shape, moved), diff


def special_numbers() -> Case:
    """From every special number to every other."""
    old, new = {}, {}
    for dtype in (F64, F32, F16, BF16, E4M3):
        numbers = units_of(special(dtype), dtype)
        was, now = (grid.reshape(-1) for grid in np.meshgrid(numbers, numbers))
        old[dtype.name] = (dtype.name, was.shape, bytearray(was.tobytes()))
        new[dtype.name] = (dtype.name, now.shape, bytearray(now.tobytes()))
    return old, new, diff


def outliers() -> Case:
    """More exponents than classes, in a block whose classes are chosen from a sample."""
    random = words(7, 140_000)
    exponents = (below(8, 140_000, 30) + 90).astype(np.uint64)
    old = units_of(exponents << np.uint64(7) | random & np.uint64(0x807F), BF16)
    return one(BF16, (140_000,), old), one(BF16, (140_000,), change(old, BF16, "few")), diff


def dense() -> Case:
    """Every weight of a norm moves a little: F32 by thousands of steps, BF16 by a few. So do every other row's."""
    f32, bf16, rows = base(F32, 3000), base(BF16, 5000), base(BF16, 600 * 128)
    old = {**one(F32, (3000,), f32), "y": ("BF16", (5000,), bytearray(bf16.tobytes()))}
    old["rows"] = ("BF16", (600, 128), bytearray(rows.tobytes()))
    moved = f32 + units_of(below(3, 3000, 5000).astype(np.uint64), F32)
    stepped = bf16 + units_of(below(4, 5000, 7).astype(np.uint64), BF16) - np.uint16(3)
    new = {**one(F32, (3000,), moved), "y": ("BF16", (5000,), bytearray(stepped.tobytes()))}
    steps = units_of(below(5, len(rows), 40).astype(np.uint64), BF16)
    steps[np.arange(len(rows)) // 128 % 2 == 1] = 0
    new["rows"] = ("BF16", (600, 128), bytearray((rows + steps).tobytes()))
    return old, new, diff


def full() -> Case:
    """Unrelated weights, incompressible bits, and zeros padded to the minimum size."""
    old = {
        "noise": ("F64", (500,), bytearray(base(F64, 500, "bits", 1).tobytes())),
        "weights": ("BF16", (5000,), bytearray(base(BF16, 5000, seed=1).tobytes())),
    }
    new = {
        "noise": ("F64", (500,), bytearray(base(F64, 500, "bits", 2).tobytes())),
        "weights": ("BF16", (5000,), bytearray(base(BF16, 5000, seed=2).tobytes())),
        "zeros": ("BF16", (300_000,), bytearray(600_000)),
    }
    return old, new, diff


def few_in_many() -> Case:
    """Three blocks: a few changes in the first, none in the second, one at the end of the third."""
    old = np.zeros(2 * BLOCK + 24, np.uint8)
    new = old.copy()
    new[[0, 77, BLOCK // 2, -1]] = [1, 2, 0x80, 0xFF]
    return one(E4M3, old.shape, old), one(E4M3, old.shape, new), diff


def stacks() -> Case:
    """A stack in which one tensor does not change, one in three blocks of which one does not, and a single tensor."""
    old: Weights = {}
    new: Weights = {}
    for k in range(12):
        name, units = f"layer.{k}.weight", base(BF16, 16 * 96, seed=k)
        old[name] = ("BF16", (16, 96), bytearray(units.tobytes()))
        now = units if k == 7 else change(units, BF16, "few", seed=k, line=96)
        new[name] = ("BF16", (16, 96), bytearray(now.tobytes()))
    for k in range(5):
        zeros = np.zeros(BLOCK // 2, np.uint8)
        old[f"part.{k}"] = ("U8", (BLOCK // 2,), bytearray(zeros))
        zeros[:: BLOCK // 8] = k not in (2, 3)
        new[f"part.{k}"] = ("U8", (BLOCK // 2,), bytearray(zeros))
    alone = base(F32, 500)
    return {**old, **one(F32, (500,), alone)}, {**new, **one(F32, (500,), change(alone, F32, "few"))}, diff


def positions_and_values() -> Case:
    old, new, _ = changed(BF16, (30, 100), "weights", "few")
    return old, new | {"added": ("U8", (3,), bytearray(b"abc"))}, lambda was, now: diff(was, now, coo=True)


def rows() -> Case:
    """A rank's shard: rows 10 to 30 of a hundred, of words of 8 bytes and of 2."""
    old, new = {}, {}
    for name, width in (("words", 64), ("units", 3)):
        units = base(BF16, 20 * width)
        old[name] = Tensor(BF16, (100, width), units, (10, 30))
        new[name] = Tensor(BF16, (100, width), change(units, BF16, "few"), (10, 30))
    return old, new, diff


def come_and_go() -> Case:
    old = {
        "dtype": ("I32", (4,), bytearray(range(16))),
        "gone": ("F32", (2,), bytearray(8)),
        "same": ("F32", (2,), bytearray(b"12345678")),
        "shape": ("U8", (2, 6), bytearray(range(12))),
        "wég": ("BOOL", (), bytearray(1)),
    }
    new = {
        "added": ("BF16", (3, 5), bytearray(range(30))),
        "dtype": ("F32", (4,), bytearray(range(16))),
        "none": ("F32", (0, 7), bytearray()),
        "same": old["same"],
        "scalar": ("F64", (), bytearray(range(8))),
        "shape": ("U8", (6, 2), bytearray(range(12))),
        "\U0001f600": ("F4", (2, 4), bytearray(range(4))),
    }
    return old, new, diff


def integers() -> Case:
    """Packed numbers, whose lines are counted in bytes: few rows, every other row, and a stack with lines."""
    old: Weights = {}
    new: Weights = {}
    for name, how in (("few", "rows"), ("many", "all"), ("stack.0", "rows"), ("stack.1", "rows")):
        shape = (20, 64) if name.startswith("stack") else (60, 72) if how == "rows" else (61, 72)
        count = shape[0] * shape[1]
        units = base(I32, count, "bits", count)
        now = change(units, I32, how, seed=len(name), line=shape[1])
        if how == "all":
            now = np.where(np.arange(count) // shape[1] % 2, units, now).astype("<u4")
        old[name] = ("I32", shape, bytearray(units.tobytes()))
        new[name] = ("I32", shape, bytearray(now.tobytes()))
    return old, new, diff


def fresh_stack() -> Case:
    new = {f"layer.{k}": ("BF16", (16, 64), bytearray(base(BF16, 16 * 64, seed=k).tobytes())) for k in range(3)}
    return {}, new, lambda _, now: anchor(now)


def everything() -> Case:
    _, new, _ = every_dtype("few")
    return {}, new, lambda _, now: anchor(now)


def nothing() -> Case:
    old, _, _ = every_dtype("few")
    return old, old, diff


CASES: dict[str, Callable[[], Case]] = {
    "anchor": everything,
    "blocks": few_in_many,
    "come-and-go": come_and_go,
    "coo": positions_and_values,
    "dense": dense,
    "dtypes-few": lambda: every_dtype("few"),
    "dtypes-half": lambda: every_dtype("half"),
    "fresh-stack": fresh_stack,
    "full": full,
    "integers": integers,
    "nothing": nothing,
    "outliers": outliers,
    "rows": rows,
    "special": special_numbers,
    "stacks": stacks,
    "steps": all_steps,
    "ulp-complement": complement,
    "ulp-down": lambda: changed(BF16, (9000,), "weights", "down"),
    "ulp-four-lanes": lambda: changed(BF16, (80_000,), "weights", "likely"),
    "ulp-sixteen-lanes": lambda: changed(BF16, (600_000,), "weights", "likely"),
    "ulp-lines": lambda: changed(BF16, (60, 128), "weights", "rows", 128),
    "ulp-lines-four-lanes": lambda: changed(BF16, (2000, 128), "weights", "rows", 128),
    "ulp-mostly-up": lambda: sparse(changed(BF16, (20_000,), "weights", "mostly-up"), 5),
    "ulp-one": lambda: changed(BF16, (1000,), "weights", "one"),
    "ulp-half": lambda: sparse(every_dtype("half"), 5),
    "ulp-one-lane": lambda: changed(BF16, (4000,), "weights", "likely"),
}


def make(name: str) -> Delta:
    """The delta of a case."""
    old, new, how = CASES[name]()
    return how(old, new)


def build() -> dict[str, bytes]:
    """All files by name. Both kernels must give the same bytes."""
    files: dict[str, bytes] = {}
    states: dict[str, dict[str, str]] = {}
    for name in CASES:
        old, new, how = CASES[name]()
        files[f"{name}.safetensors"] = how(old, new).to_bytes()
        states[name] = {"base": digest(old).hex, "result": digest(new).hex}
        kernel, block_codec.KERNEL = block_codec.KERNEL, numpy_kernel
        same = how(old, new).to_bytes() == files[f"{name}.safetensors"]
        block_codec.KERNEL = kernel
        if not same:
            raise SystemExit(f"{name}: the kernel and NumPy differ; nothing was written")
    files["states.json"] = (json.dumps(states, indent=2) + "\n").encode()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden files.")
    parser.add_argument("--overwrite", action="store_true", help="write files that differ from those that are there")
    parser.add_argument("--directory", type=Path, default=HERE, help="where they are")
    arguments = parser.parse_args()
    files = {arguments.directory / name: data for name, data in build().items()}
    differing = [path for path, data in files.items() if path.exists() and path.read_bytes() != data]
    for path in differing:
        print(f"{path.name} differs from what the code makes now", file=sys.stderr)
    if differing and not arguments.overwrite:
        raise SystemExit("nothing was written. A new format version? Then --overwrite; else the code is wrong.")
    for path, data in files.items():
        if not path.exists() or path in differing:
            path.write_bytes(data)
            print(f"{path.name}: {len(data):,} bytes")


if __name__ == "__main__":
    main()
