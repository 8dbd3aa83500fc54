"""A weight arena puts small tensors of one dtype next to each other, and copies any weights in a few steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from support.captures import BF16, F32, U8, filled, marks
from weightwire import Tensor
from weightwire.codec.block_layout import BLOCK
from weightwire.publisher.weight_arena import WeightArena
from weightwire.weights.schema import Schema
from weightwire.weights.tensor import Weights

MANY: Schema = {
    "z": (BF16, (3,)),
    "large": (BF16, (2 * BLOCK + 24,)),
    **{f"e{index}": (BF16, (BLOCK // 8 - 1,)) for index in range(20)},
    "none": (BF16, (0, 7)),
    "bias": (F32, (5,)),
    "scale": (F32, ()),
    "bytes": (U8, (3, 11)),
}


def numbered(schema: Schema) -> dict[str, Tensor]:
    """Weights with another number in every unit of a tensor's beginning."""
    weights = filled(0, schema)
    for index, tensor in enumerate(weights.values()):
        tensor.bits[:] = (np.arange(tensor.count) + 31 * index).astype(tensor.bits.dtype)
    return weights


def same(made: Weights, wanted: Weights) -> bool:
    return all(np.array_equal(made[name].bits, one.bits) for name, one in wanted.items())


def test_batches_cover_every_unit_once() -> None:
    arena = WeightArena(MANY)
    for batch in arena.batches:
        arena.units(batch)[:] += 1
        assert batch.count <= BLOCK
    assert marks(arena) == {1}
    assert sum(batch.nbytes for batch in arena.batches) == sum(one.nbytes for one in arena.values())


def test_pieces_show_where_tensors_lie() -> None:
    arena = WeightArena(MANY)
    for batch in arena.batches:
        for piece in batch.pieces:
            arena.units(batch)[piece.begin : piece.end] = piece.index + 1
            begin, end = piece.first, piece.first + piece.end - piece.begin
            assert (arena[piece.name].bits[begin:end] == piece.index + 1).all()
        assert [piece.begin for piece in batch.pieces] == [0, *(piece.end for piece in batch.pieces[:-1])]
    assert all((one.bits > 0).all() for one in arena.values())


def test_small_tensors_of_one_dtype_are_put_together_in_order_of_their_names() -> None:
    arena = WeightArena(MANY)
    groups = [[piece.name for piece in batch.pieces] for batch in arena.batches if len(batch.pieces) > 1]
    small = sorted(name for name in MANY if name.startswith("e"))
    assert groups == [small[:8], small[8:16], [*small[16:], "z"], ["bias", "scale"]]
    assert len(arena.batches) == len(groups) + 3 + 1  # and three blocks of `large`, and `bytes`


def test_batches_begin_in_new_cache_lines() -> None:
    arena = WeightArena({name: kind for name, kind in MANY.items() if name != "large"})
    assert all(arena.units(batch).ctypes.data % 64 == 0 for batch in arena.batches)
    assert all(one.at + one.nbytes <= other.at for one, other in pairwise(arena.batches))


@pytest.mark.parametrize("threads", [1, 3])
def test_all_weights_are_copied(threads: int) -> None:
    arena, weights, heard = WeightArena(MANY, threads=threads), numbered(MANY), list[int]()
    arena.copy_from(weights, heard.append)
    assert same(arena, weights)
    assert sum(heard) == sum(one.nbytes for one in weights.values())


def test_tensors_that_are_converted_while_they_are_copied_keep_their_place() -> None:
    class Converted(Tensor):
        def copy_to(self, begin: int, end: int, out: np.ndarray) -> None:
            super().copy_to(begin, end, out)
            out += 1

    weights = numbered(MANY)
    weights["e7"] = Converted(*(getattr(weights["e7"], name) for name in ("dtype", "shape", "bits")))
    arena = WeightArena(MANY)
    arena.copy_from(weights)
    assert same(arena, weights | {"e7": replace(weights["e7"], bits=weights["e7"].bits + 1)})


def test_a_shard_has_only_its_rows() -> None:
    arena = WeightArena({"x": (BF16, (100, 3)), "y": (BF16, (4,))}, {"x": (20, 30)})
    assert (arena["x"].count, arena["x"].rows, arena["y"].rows) == (30, (20, 30), None)
