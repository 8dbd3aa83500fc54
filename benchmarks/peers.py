"""The size of the same change of bf16 weights in formats published by others, and the entropy limit.

Every format is a function `(old, new) -> bytes`, written from its published layout, over mappings of tensor names to
uint16 arrays. Only the payload is counted, without names, headers and checksums. If a layout does not define what is
compressed together, positions and values are compressed separately: that was the smallest framing tried, and it gives
the published figures of these formats. Basilica v3, the best of them, is a full implementation (basilica.c, compiled
with the system's compiler), so it can be timed.

    python benchmarks/peers.py RECORDING...     # directories that record.py wrote

Needs numpy and zstandard, and `cc` for Basilica.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard
from arguments import recording_path
from numpy.typing import NDArray
from recording import read_recording

Array = NDArray[Any]
Bits = Mapping[str, NDArray[np.uint16]]
CHUNK = 1 << 22  # weights per call where NumPy needs temporaries of 8 bytes per weight
GAP_LIMIT = np.iinfo(np.uint16).max


def tensors(old: Bits, new: Bits) -> Iterator[tuple[Array, Array]]:
    """The two states tensor by tensor, flat."""
    for name, before in old.items():
        yield np.asarray(before).reshape(-1), np.asarray(new[name]).reshape(-1)


def changed_positions(before: Array, after: Array) -> Array:
    return np.flatnonzero(before != after)


def gaps_between(positions: Array) -> Array:
    """The number of unchanged weights between each change and the one before it."""
    return np.diff(positions, prepend=-1) - 1


def zstd_size(*parts: Array) -> int:
    """The size of the concatenated parts as one zstd frame."""
    return len(zstandard.ZstdCompressor(level=1).compress(b"".join(part.tobytes() for part in parts)))


# ---- the formats ----


def full_bf16(old: Bits, new: Bits) -> int:
    return sum(after.nbytes for _, after in tensors(old, new))


def trl_positions(old: Bits, new: Bits) -> int:
    """TRL's blog post: an int32 position and the new bf16 value per change."""
    return sum(6 * changed_positions(*pair).size for pair in tensors(old, new))


def trl_gap_delta(old: Bits, new: Bits) -> int:
    """TRL's gap_delta: a uint16 gap and the new value; longer gaps are split at unchanged weights."""
    size = 0
    for pair in tensors(old, new):
        gaps = gaps_between(changed_positions(*pair))
        size += 4 * int(gaps.size + (gaps // (GAP_LIMIT + 1)).sum())
    return size


def pulse(old: Bits, new: Bits) -> int:
    """PULSE and grail: uint16 gaps (uint32 where one needs it) and the new values, through zstd-1."""
    return gaps_and_values(old, new, lambda _, after: after)


def nemo_rl(old: Bits, new: Bits) -> int:
    """NeMo-RL: the same gaps, with old XOR new as values, through zstd-1."""
    return gaps_and_values(old, new, np.bitwise_xor)


def gaps_and_values(old: Bits, new: Bits, value: Callable[[Array, Array], Array]) -> int:
    size = 0
    for before, after in tensors(old, new):
        at = changed_positions(before, after)
        if at.size:
            gaps = gaps_between(at)
            width = np.uint16 if gaps.max() <= GAP_LIMIT else np.uint32
            size += zstd_size(gaps.astype(width)) + zstd_size(value(before[at], after[at]))
    return size


def dense_xor(old: Bits, new: Bits) -> int:
    """slime and SkyRL: old XOR new of every weight, through zstd-1."""
    return sum(zstd_size(before ^ after) for before, after in tensors(old, new))


def basilica(old: Bits, new: Bits) -> int:
    """Basilica v3: Rice-coded rank gaps per old exponent, zigzagged steps, through zstd-1."""
    blobs = [basilica_encode(*pair) for pair in tensors(old, new)]
    return zstd_size(*(blob.ranks for blob in blobs), *(blob.steps for blob in blobs))


FORMATS: dict[str, Callable[[Bits, Bits], int]] = {
    "full bf16": full_bf16,
    "TRL blog: int32 position + bf16 value": trl_positions,
    "TRL gap_delta: uint16 gap + bf16 value": trl_gap_delta,
    "PULSE / grail: gaps + absolute values, zstd-1": pulse,
    "slime, SkyRL: dense XOR, zstd-1": dense_xor,
    "NeMo-RL: gaps + XOR values, zstd-1": nemo_rl,
    "Basilica v3: Rice ranks per old exponent + zigzag steps, zstd-1": basilica,
}


# ---- Basilica in C ----


@functools.cache
def basilica_library() -> ctypes.CDLL:
    """Compiles and loads basilica.c. The loaded library outlives the directory that it was compiled in."""
    source = Path(__file__).with_name("basilica.c")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "basilica.so"
        flags = ["-std=c11", "-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
        loaded = ctypes.CDLL(str(library))
    pointer, count = ctypes.c_void_p, ctypes.c_uint32
    loaded.basilica_encode.argtypes = [pointer, pointer, count, pointer, pointer]
    loaded.basilica_apply.argtypes = [pointer, count, pointer, pointer]
    return loaded


class BasilicaBlob(NamedTuple):
    """One tensor's change in Basilica's layout, before zstd."""

    ranks: NDArray[np.uint8]
    steps: NDArray[np.uint8]


def basilica_encode(old: Array, new: Array) -> BasilicaBlob:
    """Both arrays must be contiguous, uint16, and have fewer than 2^32 weights."""
    out = np.empty(4 * old.size + 8192, np.uint8)
    ends = np.empty(2, np.uint64)
    if basilica_library().basilica_encode(
        old.ctypes.data, new.ctypes.data, old.size, out.ctypes.data, ends.ctypes.data
    ):
        raise MemoryError(f"out of memory while encoding {old.size} weights")
    return BasilicaBlob(out[: ends[0]], out[ends[0] : ends[1]])


def basilica_apply(base: Array, blob: BasilicaBlob) -> None:
    """Turns `base` into the new weights, in place."""
    if basilica_library().basilica_apply(base.ctypes.data, base.size, blob.ranks.ctypes.data, blob.steps.ctypes.data):
        raise MemoryError(f"out of memory while decoding {base.size} weights")


# ---- the limit ----


@dataclass(frozen=True)
class Changes:
    """What changed between two states, and the fewest bits that describe it to a receiver with the old one."""

    weights: int
    changed: int
    one_ulp: int
    position_bits: float
    step_bits: float

    @property
    def limit(self) -> int:
        return math.ceil((self.position_bits + self.step_bits) / 8)


def measure(old: Bits, new: Bits) -> Changes:
    """The limit is an ideal code for positions and steps, given the tensor and the old exponent of every weight."""
    weights = changed = one_ulp = 0
    position_bits = step_bits = 0.0
    for before, after in tensors(old, new):
        at = changed_positions(before, after)
        exponents = exponent(before[at])
        steps = order(after[at]) - order(before[at])
        weights += before.size
        changed += at.size
        one_ulp += int(np.count_nonzero(np.abs(steps) == 1))
        position_bits += position_entropy(exponent_counts(before), np.bincount(exponents, minlength=256))
        step_bits += step_entropy(exponents, steps)
    return Changes(weights, changed, one_ulp, position_bits, step_bits)


def exponent(bits: Array) -> Array:
    return (bits >> 7) & 0xFF


def order(bits: Array) -> Array:
    """Float bits as integers in the order of the floats: all bits of negatives flipped, else the sign bit."""
    return np.where(bits & 0x8000, ~bits, bits ^ 0x8000).astype(np.int32)


def exponent_counts(bits: Array) -> Array:
    counts = np.zeros(256, np.int64)
    for start in range(0, bits.size, CHUNK):
        counts += np.bincount(exponent(bits[start : start + CHUNK]), minlength=256)
    return counts


def position_entropy(members: Array, changed: Array) -> float:
    """N H(k/N) summed over the exponents: which k of N members changed."""
    return code_length(changed, members) + code_length(members - changed, members)


def step_entropy(exponents: Array, steps: Array) -> float:
    """The empirical entropy of the steps within every exponent, summed over all changes."""
    values, counts = np.unique(exponents.astype(np.int64) << 32 | (steps + (1 << 16)), return_counts=True)
    return code_length(counts, np.bincount(exponents, minlength=256)[values >> 32])


def code_length(counts: Array, totals: Array) -> float:
    """The sum of -count log2(count / total), where a count of 0 adds nothing."""
    seen = counts > 0
    return float((counts[seen] * np.log2(totals[seen] / counts[seen])).sum())


# ---- the table ----


def report(old: Bits, new: Bits) -> None:
    changes = measure(old, new)
    count = changes.changed
    print(f"  {changes.weights:,} weights, {count:,} changed ({count / changes.weights:.3%}),", end=" ")
    print(f"{changes.one_ulp / count:.1%} of them by one ulp")
    for name, size_of in FORMATS.items():
        started = time.perf_counter()
        print_row(name, size_of(old, new), count, f"{time.perf_counter() - started:6.1f} s")
    parts = f"{changes.position_bits / count:.2f} bits of position + {changes.step_bits / count:.2f} of step"
    print_row("the limit", changes.limit, count, parts)


def print_row(name: str, size: int, changed: int, note: str) -> None:
    print(f"  {name:64s} {size / 1e6:9.3f} MB  {size / changed:8.3f} B/change  {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the payload of every peer's format, and the limit.")
    parser.add_argument("recordings", nargs="+", type=recording_path, help="directories that record.py wrote")
    for directory in parser.parse_args().recordings:
        description, old, new = read_recording(directory)
        masters = f"{description['stage']}, masters {description['masters']}"
        print(f"{directory}: {description['model']}, lr {description['lr']}, {masters}")
        report(old, new)


if __name__ == "__main__":
    main()
