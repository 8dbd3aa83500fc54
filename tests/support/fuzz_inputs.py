"""Golden files and their blocks, as the fuzzer takes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from golden.make import CASES, HERE
from weightwire import Delta
from weightwire.weights.dtypes import DTYPES, Dtype
from weightwire.weights.source import read_weights


@dataclass(frozen=True)
class Block:
    """A block and all that is needed to decode it."""

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


@dataclass(frozen=True)
class File:
    """A delta file and its base."""

    name: str
    data: bytes
    old: dict[str, Any]


def golden_blocks(most: int) -> list[Block]:
    """Every block of at most so many units in the golden files."""
    blocks = []
    for name, case in CASES.items():
        delta, old = Delta.open(HERE / f"{name}.safetensors"), read_weights(case()[0])
        for entry in delta.entries.values():
            for index in range(0 if entry.coo else len(entry.blocks)):
                begin, end = entry.layout.span(index)
                if entry.blocks[index] and end - begin <= most:
                    base = None if entry.fresh else old[entry.name].bits[begin:end].tobytes()
                    data = bytes(delta.block(entry, index))
                    blocks.append(Block(name, data, base, end - begin, entry.dtype.name, entry.layout.line))
    return blocks


def golden_files() -> list[File]:
    files = []
    for name, case in CASES.items():
        old = case()[0]
        if sum(tensor.nbytes for tensor in read_weights(old).values()) < 1 << 20:
            files.append(File(name, (HERE / f"{name}.safetensors").read_bytes(), old))
    return files
