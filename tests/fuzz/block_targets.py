"""Targets for the encodings of blocks: the C kernel and NumPy must give the same result, or both reject."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fuzz.blocks import HEAD, Block, block_in, input_of, repeated
from fuzz.mutations import damage, lie
from fuzz.target import ACCEPTED, Target, demand
from fuzz.verdicts import decode_with, judge_block
from support.encoded import encode_dense, encode_ulp
from support.samples import CHANGES, LAYOUTS, change, unit_dtype, vector_widths, words
from weightwire.codec import _kernel
from weightwire.codec.block_frame import DENSE, FULL, ULP
from weightwire.codec.block_layout import Layout
from weightwire.codec.coo_encoding import decode_coo, encode_coo
from weightwire.codec.full_encoding import encode_full
from weightwire.weights.dtypes import DTYPES, Dtype

KINDS = {"ulp": ULP, "dense": DENSE, "full": FULL}
HOSTILE = Path(__file__).parents[1] / "hostile" / "blocks"


def check_block(kind: int, data: bytes) -> str:
    block = block_in(data, kind)
    return "too short" if block is None else judge_block(block, vector_widths(), compare=True)


def mutate_block(kind: int, data: bytes, rng: random.Random) -> bytes:
    """Damages the block, changes a field of it, or encodes another change of the same base."""
    block = block_in(data, kind)
    if block is None or rng.random() < 0.2:
        return damage(data, rng, data)
    head = data[: len(data) - len(block.data)]
    what = rng.random()
    if what < 0.2:
        return head + damage(block.data, rng, data)
    if what < 0.3:
        return head + encoded(block, kind, rng.choice(CHANGES), rng.randrange(1 << 16))
    if what < 0.4:
        return damage(head[:HEAD], rng, head)[:HEAD].ljust(HEAD, b"\0") + data[HEAD:]
    if isinstance(decode_with(_kernel, block), str):  # it is not well-formed, so it has no fields to change
        return head + damage(block.data, rng, data)
    return head + lie(block, rng)


def encoded(block: Block, kind: int, how: str, seed: int) -> bytes:
    """A valid block with the fields of another one."""
    dtype = block.kind
    old = np.frombuffer(block.old or bytes(block.count * dtype.unit), unit_dtype(dtype))
    new = change(old, dtype, how, seed, block.line)
    if kind == ULP:
        return encode_ulp(old, new, dtype, block.line)
    return encode_dense(old, new, dtype, block.line) if kind == DENSE else encode_full(new, dtype)


def block_seeds(kind: int) -> Iterator[bytes]:
    """Blocks of every dtype layout, and the hostile blocks of this kind."""
    for index, dtype in enumerate(LAYOUTS):
        for count, line in ((1, 0), (200, 0), (512, 64)):
            pattern = words(index + 1, 24).tobytes()[: 24 * dtype.unit]
            block = Block("seed", bytes([kind]), repeated(pattern, count * dtype.unit), count, dtype.name, line)
            hows = ("few", "rows", "all") if line else ("half",)
            for how in hows:
                yield input_of(replace(block, data=encoded(block, kind, how, index))) or b""
    for path in sorted(HOSTILE.glob("*.json")):
        block = Block.from_json(path.read_text())
        if block.data[0] & 3 == kind and (made := input_of(block)):
            yield made


def block_target(name: str) -> Target:
    kind = KINDS[name]
    return Target(
        f"block-{name}",
        partial(check_block, kind),
        partial(mutate_block, kind),
        partial(block_seeds, kind),
        largest=2048,
    )


# --- coo ---------------------------------------------------------------------------------------------------------

COO_DTYPES: tuple[Dtype, ...] = tuple(DTYPES[name] for name in ("U8", "BF16", "F32", "I64"))
COO_SHAPES: tuple[tuple[int, ...], ...] = ((100,), (), (3, 64), (5000, 2000), (1 << 20, 1 << 13))


def check_coo(data: bytes) -> str:
    """The first byte chooses the layout, the next two the number of changes."""
    if len(data) < 3:
        return "too short"
    dtype, shape = COO_DTYPES[data[0] & 3], COO_SHAPES[(data[0] >> 2) % len(COO_SHAPES)]
    layout, changed, block = Layout.of(dtype, shape), int.from_bytes(data[1:3], "little"), data[3:]
    try:
        found = list(decode_coo(memoryview(block), layout, changed))
    except ValueError as problem:
        return str(problem)
    changes = [
        (index, np.frombuffer(at, "<u4").astype(np.int64), np.frombuffer(units, unit_dtype(dtype)))
        for index, at, units in found
    ]
    demand(sum(len(at) for _, at, _ in changes) == changed, "the number of changes")
    for index, at, units in changes:
        begin, end = layout.span(index)
        demand(len(at) == len(units) > 0 and bool((np.diff(at) > 0).all()) and at[-1] < end - begin, "positions")
    if changes:
        demand(encode_coo(changes, layout) == block, "a coo block does not round-trip")
    return ACCEPTED


def coo_seeds() -> Iterator[bytes]:
    for first in range(4 * len(COO_SHAPES)):
        dtype, shape = COO_DTYPES[first & 3], COO_SHAPES[first >> 2]
        layout = Layout.of(dtype, shape)
        changes = []
        for index in {0, layout.blocks - 1}:
            begin, end = layout.span(index)
            at = np.unique(words(first, 5) % np.uint64(end - begin)).astype(np.int64)
            changes.append((index, at, words(index, len(at)).astype(unit_dtype(dtype))))
        changed = sum(len(at) for _, at, _ in changes)
        yield (
            bytes([first]) + changed.to_bytes(2, "little") + encode_coo(sorted(changes, key=lambda one: one[0]), layout)
        )


def mutate_coo(data: bytes, rng: random.Random) -> bytes:
    return data[:3] + damage(data[3:], rng, data) if rng.random() < 0.8 else damage(data, rng, data)


TARGETS = [*(block_target(name) for name in KINDS), Target("block-coo", check_coo, mutate_coo, coo_seeds, largest=512)]
