"""Assigns every row to the rank that publishes it. Pure.

If several ranks hold the same rows, the one with the least work publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from weightwire.codec import Layout
from weightwire.errors import CheckpointError
from weightwire.weights import DTYPES, Dtype, Rows, Schema, Weights

__all__ = ["HeldRows", "Partition", "RankHoldings", "holdings_of", "partition_rows"]


class HeldRows(msgspec.Struct, frozen=True):
    """A tensor, or the rows of it that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @property
    def covers(self) -> Rows:
        """The rows it holds. A tensor without dimensions counts as one row."""
        return self.rows or (0, self.shape[0] if self.shape else 1)

    @property
    def nbytes(self) -> int:
        dtype = DTYPES[self.dtype]
        return Layout.of(dtype, self.shape, self.rows).count * dtype.unit


class RankHoldings(msgspec.Struct, frozen=True):
    """What one rank holds: pieces by name, and aliases. `closed` if it has closed its publisher."""

    pieces: dict[str, HeldRows] = {}
    aliases: dict[str, str] = {}
    closed: bool = False


@dataclass(frozen=True)
class Partition:
    """The schema of the whole model, and for each rank the names whose pieces it publishes."""

    schema: Schema
    aliases: Mapping[str, str]
    names: tuple[frozenset[str], ...]


def holdings_of(weights: Weights, aliases: Mapping[str, str]) -> RankHoldings:
    pieces = {name: HeldRows(one.dtype.name, one.shape, one.rows) for name, one in weights.items()}
    return RankHoldings(pieces, dict(aliases))


def partition_rows(holdings: Sequence[RankHoldings]) -> Partition:
    """Assigns every row of every tensor to exactly one rank. Raises CheckpointError if that is impossible."""
    names = list(dict.fromkeys(name for one in holdings for name in one.pieces))
    if not names:
        raise CheckpointError("no rank has tensors to publish", hint="pass the weights of a model")
    held = {name: {rank: one.pieces[name] for rank, one in enumerate(holdings) if name in one.pieces} for name in names}
    schema = {name: _kind(name, pieces) for name, pieces in held.items()}
    for name, pieces in held.items():
        _check_rows(name, schema[name][1], {piece.covers for piece in pieces.values()})
    aliases = {name: other for one in holdings for name, other in one.aliases.items()}
    return Partition(
        schema, {name: aliases[name] for name in aliases if name not in schema}, _choose(held, len(holdings))
    )


def _kind(name: str, pieces: Mapping[int, HeldRows]) -> tuple[Dtype, tuple[int, ...]]:
    (first, one), *others = pieces.items()
    for rank, other in others:
        if (other.dtype, other.shape) != (one.dtype, one.shape):
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (one, other))
            what = f"is {here} on rank {first}, but {there} on rank {rank}"
            _fail(name, what, "give every shard the shape of the whole tensor, and `rows`")
    return DTYPES[one.dtype], one.shape


def _check_rows(name: str, shape: tuple[int, ...], covered: set[Rows]) -> None:
    end = 0
    for first, last in sorted(covered):
        if first < end:
            _fail(
                name,
                f"rows {first} to {min(last, end)} are in two shards",
                "let shards have the same rows, or disjoint ones",
            )
        if first > end:
            _fail(name, f"no rank holds rows {end} to {first}", "publish on every rank of the model")
        end = last
    if end < (shape[0] if shape else 1):
        _fail(name, f"no rank holds rows {end} to {shape[0]}", "publish on every rank of the model")


def _choose(held: Mapping[str, Mapping[int, HeldRows]], ranks: int) -> tuple[frozenset[str], ...]:
    """Assigns pieces with a single holder first, then the largest, to balance the load."""
    holders: dict[tuple[str, Rows], list[int]] = {}
    for name, pieces in held.items():
        for rank, piece in pieces.items():
            holders.setdefault((name, piece.covers), []).append(rank)

    def size(key: tuple[str, Rows]) -> int:
        return held[key[0]][holders[key][0]].nbytes

    load = [0] * ranks
    chosen: list[set[str]] = [set() for _ in range(ranks)]
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -size(key), key)):
        owner = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owner] += size(key)
        chosen[owner].add(key[0])
    return tuple(map(frozenset, chosen))


def _fail(name: str, what: str, hint: str) -> NoReturn:
    raise CheckpointError(f"tensor {name!r}: {what}", hint=hint)
