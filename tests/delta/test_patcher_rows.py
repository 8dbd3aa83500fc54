"""Deltas of some rows, as ranks make them, applied to shards and to whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.patch_checks import bytes_of, shard
from support.samples import words
from weightwire import (
    CheckpointError,
    Delta,
    WrongBase,
    anchor,
    diff,
    patch,
)
from weightwire.delta.patcher import apply_in_place


def test_shards_are_applied_to_shards(ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]) -> None:
    old, new, deltas = ranks
    for rows, delta in zip(((0, 50), (50, 100)), deltas, strict=True):
        held = shard(old.copy(), *rows)
        patch(held, delta)
        assert held["x"].bits.tobytes() == new[slice(*rows)].tobytes()


def test_shards_are_applied_to_the_whole(ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]) -> None:
    old, new, deltas = ranks
    for copy in (True, False):
        weights: Any = {"x": old.copy()}
        for delta in deltas:
            weights = patch(weights, delta, copy=copy)
        assert bytes_of(weights) == {"x": new.tobytes()}


def test_shards_are_applied_to_larger_shards(ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]) -> None:
    old, new, deltas = ranks
    held = shard(old.copy(), 40, 100)
    patch(held, deltas[1])
    assert held["x"].bits.tobytes() == np.concatenate([old[40:50], new[50:]]).tobytes()


def test_rows_missing_in_the_base_are_rejected(ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]) -> None:
    old, new, deltas = ranks
    for held in (shard(old, 0, 50), shard(old, 60, 100)):
        with pytest.raises(WrongBase, match="some rows are missing in the base"):
            patch(held, deltas[1], copy=True)
    with pytest.raises(WrongBase, match="some rows are missing in the base"):
        patch(shard(old, 0, 50), diff({"x": old}, {"x": new}), copy=True)


def test_rows_of_a_new_tensor_need_an_existing_tensor() -> None:
    made = anchor(shard(words(1, 1600).view(np.uint16).reshape(100, 64), 10, 20))
    with pytest.raises(
        CheckpointError, match=r"holds only rows 10 to 20 of tensor '\w+', which the base does not have"
    ):
        patch({}, made, copy=True)
    held = shard(np.zeros((100, 64), np.uint16), 10, 20)
    patch(held, made)
    assert held["x"].bits.tobytes() == words(1, 1600).view(np.uint16).reshape(100, 64)[10:20].tobytes()


def test_new_rows_fill_a_place_in_a_copy_too() -> None:
    """Rows that the base of the delta lacked. The weights that they are applied to have them."""
    old, new = (words(seed, 1600).view(np.uint16).reshape(100, 64) for seed in (1, 2))
    made = diff({}, shard(new, 10, 20))
    for copy in (True, False):
        patched = patch({"x": old.copy()}, made, copy=copy)["x"]
        assert patched[10:20].tobytes() == new[10:20].tobytes()
        assert np.delete(patched, slice(10, 20), axis=0).tobytes() == np.delete(old, slice(10, 20), axis=0).tobytes()


def test_an_anchor_of_several_ranks_is_applied_file_by_file() -> None:
    """One file per rank: rows of some tensors, and other tensors completely."""
    new = {"x": words(1, 1600).view(np.uint16).reshape(100, 64), "y": np.arange(9, dtype=np.uint16)}
    files = [anchor({**shard(new["x"], 0, 40), "y": new["y"]}), anchor(shard(new["x"], 40, 100))]
    held = {"x": np.zeros((100, 64), np.uint16), "y": np.zeros(9, np.uint16)}
    for file in files:
        apply_in_place(held, file, keep=False)
    assert bytes_of(held) == bytes_of(new)
    with pytest.raises(CheckpointError, match="added, removed or reshaped"):
        apply_in_place(shard(new["x"], 0, 50), files[1])
