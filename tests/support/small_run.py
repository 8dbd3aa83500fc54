"""A small run: some versions, and the deltas between them."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np

from support.samples import Units, base, below, change
from weightwire import Delta, State, Tensor, diff, digest
from weightwire.replica.replica import Replica
from weightwire.replica.workdir import Position
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.schema import Schema
from weightwire.weights.source import read_weights

SHAPES = {"embed": ("BF16", (200, 64)), "layer": ("BF16", (96, 128)), "norm": ("F32", (64,)), "steps": ("I64", ())}
FILES: dict[str, bytes | Path] = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}

Bits = dict[str, bytes]


def bits_of(weights: object) -> Bits:
    return {name: tensor.bits.tobytes() for name, tensor in read_weights(weights).items()}  # type: ignore[arg-type]


class Story:
    """Versions 0 to `last`. Each changes a few weights, and all of `norm` and `steps`. Every fifth changes nothing."""

    def __init__(self, last: int = 6, run: str = "run", seed: int = 1) -> None:
        self.run, self.last = run, last
        self.versions = [self._first(seed)]
        for version in range(1, last + 1):
            self.versions.append(self._next(self.versions[-1], seed * 1000 + version, still=version % 5 == 0))

    def _first(self, seed: int) -> dict[str, Tensor]:
        weights = {}
        for i, (name, (dtype, shape)) in enumerate(SHAPES.items()):
            bits = base(DTYPES[dtype], int(np.prod(shape)), seed=seed * 100 + i)
            weights[name] = Tensor(DTYPES[dtype], shape, bits)
        return weights

    def _next(self, before: dict[str, Tensor], seed: int, still: bool) -> dict[str, Tensor]:
        return before if still else {name: Tensor(t.dtype, t.shape, _change(t, seed)) for name, t in before.items()}

    @cached_property
    def states(self) -> list[State]:
        return [digest(weights) for weights in self.versions]

    @cached_property
    def bits(self) -> list[Bits]:
        return [bits_of(weights) for weights in self.versions]

    @cached_property
    def _deltas(self) -> list[bytes]:
        return [
            b"" if old is new else diff(old, new).to_bytes()
            for old, new in zip(self.versions, self.versions[1:], strict=False)
        ]

    def prepare(self) -> None:
        """Computes all cached values now, for forked processes."""
        assert len(self.states) == len(self.bits) == len(self._deltas) + 1

    def deltas(self, version: int) -> list[Delta]:
        """The files of a version: one, or none if it changes nothing."""
        data = self._deltas[version - 1]
        return [Delta.from_bytes(data)] if data else []

    def at(self, version: int) -> Position:
        return Position(self.run, version, hashlib.sha256(f"{self.run} {version}".encode()).hexdigest())

    @property
    def schema(self) -> Schema:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.versions[0].items()}

    def build(self, replica: Replica, version: int = 0) -> None:
        with replica.rebuild(self.schema, FILES) as new:
            for name in new:
                new[name].bits[:] = self.versions[version][name].bits
            new.finish(self.at(version), self.states[version])

    def advance(self, replica: Replica, version: int) -> Delta:
        return replica.advance(self.deltas(version), self.at(version), self.states[version].hex)


def _change(tensor: Tensor, seed: int) -> Units:
    bits = tensor.bits
    if tensor.dtype.name == "BF16":
        return change(bits, tensor.dtype, "few", seed)
    return bits + below(seed, len(bits), 1000).astype(bits.dtype) + bits.dtype.type(1)
