"""A weight arena puts small tensors of one dtype next to each other, and copies any weights in a few steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from support.captures import BF16, F32, U8, filled, marks
from weightwire import Tensor, anchor
from weightwire.codec.block_layout import BLOCK
from weightwire.delta.tensor_stacks import kind_of, stacks_of
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
            units = arena.units(batch)[piece.begin : piece.end]
            assert len(units) == piece.layout.count
            units[:] = piece.index + 1
            held = piece.stack.units(arena, piece.index)
            assert not isinstance(held, tuple)
            assert (held.ctypes.data, len(held)) == (units.ctypes.data, len(units))
            same = piece.stack.units({**arena}, piece.index)
            assert (np.concatenate(same if isinstance(same, tuple) else [same]) == piece.index + 1).all()
        assert [piece.begin for piece in batch.pieces] == [0, *(piece.end for piece in batch.pieces[:-1])]
    assert all((one.bits > 0).all() for one in arena.values())


def test_small_tensors_of_one_dtype_are_put_together() -> None:
    arena = WeightArena(MANY)
    held = [[name for piece in batch.pieces for name in piece.stack.members(piece.index)] for batch in arena.batches]
    small = sorted(name for name in MANY if name.startswith("e"))
    assert held == [
        small[:7],
        small[7:14],
        small[14:],
        ["large"],
        ["large"],
        ["large"],
        ["z"],
        ["bias", "scale"],
        ["bytes"],
    ]


def test_a_stack_of_fewer_tensors_is_not_taken_for_a_whole_one() -> None:
    arena = WeightArena(MANY)
    arena.copy_from(numbered(MANY))
    some = {name: kind_of(arena[name]) for name in ["e0", "e1", "e11"]}
    (stack,) = stacks_of(some)
    held = stack.units(arena, 0)
    assert isinstance(held, tuple)
    assert all(np.array_equal(one, arena[name].bits) for one, name in zip(held, ["e0", "e1", "e11"], strict=True))


def test_stacks_begin_in_new_cache_lines() -> None:
    arena = WeightArena(MANY)
    first = [batch for batch in arena.batches if batch.pieces[0].index == 0]
    assert all(arena.units(batch).ctypes.data % 64 == 0 for batch in first)
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


def test_an_anchor_is_encoded_from_the_arena_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = WeightArena(MANY)
    arena.copy_from(numbered(MANY))
    expected = anchor({**arena}).to_bytes()
    concatenate = np.concatenate

    def only_sums(arrays: list[np.ndarray]) -> np.ndarray:
        assert all(one.dtype.itemsize == 8 for one in arrays)  # digests and counts, no weights
        return concatenate(arrays)

    monkeypatch.setattr(np, "concatenate", only_sums)
    assert anchor(arena).to_bytes() == expected
