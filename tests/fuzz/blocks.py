"""Blocks as inputs: with their base in JSON, as golden files, and as the input of a fuzz target.

The input of a target is one string of bytes, which kernel_harness.c reads in the same way:

    byte 0       the layout of a unit: an index into LAYOUTS
    bytes 1, 2   the number of units (see `count_in`)
    byte 3       the length of a line: 0 for none, or 56 + 8 times this
    byte 4       the size of a pattern; 0 without a base
    pattern      repeated, it is the base
    block        the rest
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from golden.make import CASES, HERE
from support.samples import LAYOUTS
from weightwire import Delta
from weightwire.delta.decoder import BlockJob, jobs_of, units_of
from weightwire.weights import Weights
from weightwire.weights.dtypes import DTYPES, Dtype
from weightwire.weights.source import read_weights

HEAD = 5


@dataclass(frozen=True)
class Block:
    """A block with everything that is needed to decode it."""

    name: str
    data: bytes
    old: bytes | None
    count: int
    dtype: str
    line: int

    @property
    def kind(self) -> Dtype:
        return DTYPES[self.dtype]

    def to_json(self) -> str:
        fields = asdict(self) | {"data": self.data.hex(), "old": self.old.hex() if self.old is not None else None}
        return json.dumps(fields, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Block:
        fields = json.loads(text)
        old = bytes.fromhex(fields["old"]) if fields["old"] is not None else None
        return Block(**fields | {"data": bytes.fromhex(fields["data"]), "old": old})


# --- inputs of targets -------------------------------------------------------------------------------------------


def count_in(low: int, high: int) -> int:
    """Mostly few units, which is fast. The kernel's loops work on chunks of 4096, so some blocks have two."""
    return 1 + low + 256 * (high & (1 if high < 0xE0 else 31))


def block_in(data: bytes, kind: int) -> Block | None:
    """The block in an input, with this encoding. None if the input is too short."""
    pattern = data[HEAD : HEAD + data[4]] if len(data) > HEAD else b""
    block = bytearray(data[HEAD + len(pattern) :])
    if not block:
        return None
    dtype = LAYOUTS[data[0] % len(LAYOUTS)]
    count = count_in(data[1], data[2])
    line = 56 + 8 * data[3] if data[3] else 0
    line = line if line <= count else 0
    count -= count % line if line else 0
    block[0] = block[0] & ~3 | kind
    return Block("input", bytes(block), repeated(pattern, count * dtype.unit), count, dtype.name, line)


def repeated(pattern: bytes, size: int) -> bytes | None:
    return np.resize(np.frombuffer(pattern, np.uint8), size).tobytes() if pattern else None


def input_of(block: Block) -> bytes | None:
    """The input for a block. None if its fields do not fit into one."""
    layout = [dtype.name for dtype in LAYOUTS].index(block.dtype) if block.kind in LAYOUTS else None
    pattern = b"" if block.old is None else pattern_of(block.old)
    high = (block.count - 1) // 256
    head = bytes([layout or 0, (block.count - 1) % 256, high if high < 2 else 0xE0 | high & 31, 0, len(pattern or b"")])
    if block.line:
        head = head[:3] + bytes([(block.line - 56) // 8 % 256]) + head[4:]
    made = head + (pattern or b"") + block.data
    found = block_in(made, block.data[0] & 3) if layout is not None and pattern is not None else None
    return made if found and replaced_name(found, block.name) == block else None


def replaced_name(block: Block, name: str) -> Block:
    return Block(**asdict(block) | {"name": name})


def pattern_of(base: bytes) -> bytes | None:
    """The shortest pattern that this base repeats, if it is short enough."""
    sizes = (size for size in range(1, min(len(base), 255) + 1) if repeated(base[:size], len(base)) == base)
    size = next(sizes, None)
    return None if size is None else base[:size]


# --- golden files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A delta file and its base."""

    name: str
    data: bytes
    old: dict[str, Any]


def golden_blocks(most: int) -> list[Block]:
    """Every block of the golden files with at most this many units."""
    blocks = []
    for name, case in CASES.items():
        delta, old = Delta.open(HERE / f"{name}.safetensors"), read_weights(case()[0])
        for job in jobs_of(delta, [stack for stack in delta.stacks if not stack.coo]):
            if job.stack.layout.alone(job.index).count <= most:
                blocks.append(block_of(name, delta, job, old))
    return blocks


def block_of(name: str, delta: Delta, job: BlockJob, old: Weights) -> Block:
    """A block of a file, with the units of its base: those of all its members, one behind the other."""
    layout, units = job.stack.layout.alone(job.index), None if job.stack.fresh else units_of(old, job)
    base = (
        None if units is None else b"".join(one.tobytes() for one in (units if isinstance(units, tuple) else [units]))
    )
    data = bytes(delta.fetch(*job.stack.span(range(job.index, job.index + 1))))
    return Block(name, data, base, layout.count, layout.dtype.name, layout.line)


def golden_files() -> list[File]:
    files = []
    for name, case in CASES.items():
        old = case()[0]
        if sum(tensor.nbytes for tensor in read_weights(old).values()) < 1 << 20:
            files.append(File(name, (HERE / f"{name}.safetensors").read_bytes(), old))
    return files
