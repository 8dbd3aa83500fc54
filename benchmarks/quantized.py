"""Measures the size of a step of quantized weights, against the limit of what the receiver knows.

    python benchmarks/quantized.py                  # synthetic bf16 steps at lr 1e-6 and 1e-3; half a minute
    python benchmarks/quantized.py RECORDING...     # directories that record.py wrote
    python benchmarks/quantized.py --json ...       # the same as JSON

Both checkpoints of a bf16 step are quantized as vLLM reads them: to FP8 (E4M3) with an F32 scale for each block of
128x128, and to packed INT4 with a bf16 scale for each group of 32, by the compressed-tensors package. Only matrices
with such sizes count. The limit is an ideal code for which numbers change and how, given the tensor and, of each
number, the old exponent, or for INT4 the old value. It gets all rates for free, so small deltas are further from it.
Every delta is applied, and the result is compared bit for bit.

Needs torch, compressed-tensors (which comes with vLLM) and zstandard.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from arguments import benchmark_parser, recording_path
from benchmark_run import run_benchmark
from compressed_tensors.compressors import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.typing import NDArray
from peers import code_length, zstd_size
from recording import read_recording
from synthetic import Bits, Stage, synthetic, synthetic_dense
from table import Bar, Payload, Report, Row

import weightwire

BLOCK, GROUP = 128, 32
LARGEST_FP8 = 448.0
LIMIT = Bar(1.06)
# The limit knows the rates of every tensor for free. A small delta pays for them.
JUDGED_FROM = 100_000  # bytes

Integers = NDArray[np.int64]
Part = tuple[str, tuple[int, ...], NDArray[np.uint8]]  # dtype, shape, bytes
Parts = dict[str, Part]


@dataclass(frozen=True)
class Scheme:
    """How to quantize a matrix into named parts."""

    title: str
    step: int  # both dimensions, or the last one, are multiples of this
    quantized: Callable[[torch.Tensor], Parts]


def main() -> None:
    arguments = parse_arguments()
    run_benchmark(lambda _: reports(arguments.recordings), as_json=arguments.json)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser("Measure the size of a step of quantized weights.")
    parser.add_argument("recordings", nargs="*", type=recording_path, help="directories that record.py wrote")
    return parser.parse_args()


def reports(recordings: list[Path]) -> Iterator[Report]:
    for title, old, new in map(recorded, recordings) if recordings else synthesised():
        for scheme in SCHEMES:
            yield measure(title, scheme, quantize_all(old, scheme), quantize_all(new, scheme))


def recorded(directory: Path) -> tuple[str, Bits, Bits]:
    facts, old, new = read_recording(directory)
    return f"recorded: {facts['stage']}, {facts['model']}, lr {facts['lr']:g}: {directory}", old, new


def synthesised() -> Iterator[tuple[str, Bits, Bits]]:
    for stage in get_args(Stage):
        yield (f"synthetic: {stage}, changed as by AdamW at lr 1e-6", *synthetic(stage))
    yield ("synthetic: one step at lr 1e-3", *synthetic_dense())


# ---- quantized weights ----


def quantize_all(weights: Bits, scheme: Scheme) -> Parts:
    """The parts of all matrices that have blocks or groups."""
    parts: Parts = {}
    for name, bits in weights.items():
        if bits.ndim == 2 and all(size % BLOCK == 0 for size in bits.shape):
            matrix = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
            parts |= {f"{name}.{part}": one for part, one in scheme.quantized(matrix).items()}
    return parts


def to_fp8(matrix: torch.Tensor) -> Parts:
    rows, columns = matrix.shape
    blocks = matrix.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = (blocks.abs().amax((1, 3)) / LARGEST_FP8).clamp(min=1e-12)
    numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, columns)
    return {"weight": part("F8_E4M3", numbers), "weight_scale_inv": part("F32", scales)}


def to_int4(matrix: torch.Tensor) -> Parts:
    how = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=GROUP)
    groups = matrix.reshape(len(matrix), -1, GROUP)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), how)
    numbers = quantize(matrix, scales, zeros, how, dtype=torch.int8)
    return {"weight_packed": part("I32", pack_to_int32(numbers, 4)), "weight_scale": part("BF16", scales.bfloat16())}


def part(dtype: str, tensor: torch.Tensor) -> Part:
    return dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


SCHEMES = (
    Scheme("FP8, blocks of 128x128", BLOCK, to_fp8),
    Scheme("packed INT4, groups of 32", GROUP, to_int4),
)


# ---- measurements ----


def measure(title: str, scheme: Scheme, old: Parts, new: Parts) -> Report:
    delta = weightwire.diff(old, new)
    target = {name: (dtype, shape, data.copy()) for name, (dtype, shape, data) in old.items()}
    weightwire.patch(target, delta)
    if any(not np.array_equal(target[name][2], new[name][2]) for name in new):
        raise SystemExit(f"{scheme.title}: the result differs from the new weights")
    counts = [Numbers.of(old[name], new[name]) for name in old]
    bits = sum(one.bits for one in counts)
    changed = sum(one.changed for one in counts)
    numbers, scales = (
        [one for name, one in zip(old, counts, strict=True) if ("scale" in name) == is_scale]
        for is_scale in (False, True)
    )
    limit, raw = int(np.ceil(bits / 8)), sum(data.nbytes for _, _, data in new.values())
    xor = sum(zstd_size(old[name][2] ^ new[name][2]) for name in old)
    bar = LIMIT if limit >= JUDGED_FROM else None
    return Report(
        title=f"{title}\n  {scheme.title}: {raw / 1e6:.1f} MB",
        facts={"scheme": scheme.title, "changed": changed, "limit": limit},
        changed=changed,
        limit=limit,
        payloads=[
            Payload("all quantized weights", raw),
            Payload("dense XOR, zstd-1", xor),
            Payload("weightwire, the whole file", delta.nbytes),
            Payload("the limit, given tensor and old number", limit),
        ],
        rows=[
            Row("changed numbers, %", 100 * share(numbers), "{:.3f}", None),
            Row("changed scales, %", 100 * share(scales), "{:.3f}", None),
            Row("payload / limit", delta.nbytes / limit, "{:.4f}", bar),
            Row("payload / dense XOR", delta.nbytes / xor, "{:.4f}", Bar(1.0)),
            Row("payload / all quantized weights", delta.nbytes / raw, "{:.6f}", None),
        ],
    )


@dataclass(frozen=True)
class Numbers:
    """The numbers of a part: how many, how many changed, and the fewest bits that describe the changes."""

    count: int
    changed: int
    bits: float

    @staticmethod
    def of(old: Part, new: Part) -> Numbers:
        before, contexts = numbers_of(old)
        after, _ = numbers_of(new)
        members = np.bincount(contexts)
        outcomes, counts = np.unique(contexts << 40 | (after - before + (1 << 33)), return_counts=True)
        bits = code_length(counts, members[outcomes >> 40])
        return Numbers(len(before), int(np.count_nonzero(before != after)), bits)


def numbers_of(one: Part) -> tuple[Integers, Integers]:
    """The numbers of a part in their order, and the context of each: its exponent, or a packed number itself."""
    dtype, _, data = one
    if dtype == "I32":
        packed = np.stack([data & 15, data >> 4], axis=1).reshape(-1).astype(np.int64)
        return packed, packed
    bits = data.view({"F8_E4M3": np.uint8, "BF16": np.uint16, "F32": np.uint32}[dtype]).astype(np.int64)
    width, mantissa = {"F8_E4M3": (8, 3), "BF16": (16, 7), "F32": (32, 23)}[dtype]
    top = 1 << (width - 1)
    ordered = np.where(bits & top, (top << 1) - 1 - bits, bits | top)
    return ordered, (bits & (top - 1)) >> mantissa


def share(parts: list[Numbers]) -> float:
    return sum(one.changed for one in parts) / sum(one.count for one in parts)


if __name__ == "__main__":
    main()
