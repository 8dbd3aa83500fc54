"""The changes of a delta, decoded without writing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.patch_checks import F32, shard
from support.samples import base, words
from weightwire import (
    CheckpointError,
    Delta,
    WrongBase,
    diff,
)
from weightwire.delta.decoder import changes


def test_changes_can_be_limited_to_rows() -> None:
    old = words(1, 1600).view(np.uint16).reshape(100, 64)
    new = old.copy()
    new[[3, 50, 99], [1, 2, 3]] += 1
    delta = diff({"x": old}, {"x": new})
    expected = np.flatnonzero(old.reshape(-1) != new.reshape(-1))
    positions, values = changes({"x": old}, delta, "x")
    assert positions.tolist() == expected.tolist()
    assert values.tolist() == new.reshape(-1)[expected].tolist()
    positions, values = changes({"x": old}, delta, "x", (50, 60))
    assert positions.tolist() == [50 * 64 + 2]
    assert values.tolist() == [new[50, 2]]
    assert len(changes({"x": old}, delta, "x", (51, 99))[0]) == 0
    assert len(changes({"x": old}, delta, "x", (50, 50))[0]) == 0


def test_changes_of_an_unchanged_tensor_are_empty() -> None:
    old = {"x": np.zeros(10, np.uint16), "y": np.zeros(10, np.uint16)}
    positions, values = changes(old, diff(old, {"x": np.ones(10, np.uint16), "y": old["y"]}), "y")
    assert (len(positions), len(values)) == (0, 0)
    assert values.dtype == np.uint16


def test_changes_of_a_packed_tensor_count_its_bytes() -> None:
    old, new = {"x": ("F4", (200,), bytes(100))}, {"x": ("F4", (200,), bytes(70) + b"X" + bytes(29))}
    positions, values = changes(old, diff(old, new), "x")
    assert (positions.tolist(), values.tolist()) == ([70], [ord("X")])


def test_changes_of_a_shard_count_from_the_start_of_the_tensor(
    ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]],
) -> None:
    old, _, deltas = ranks
    assert changes({"x": old}, deltas[1], "x")[0].tolist() == [50 * 64 + 3, 99 * 64 + 4]
    assert changes(shard(old, 50, 100), deltas[1], "x", (99, 100))[0].tolist() == [99 * 64 + 4]


def test_changes_of_a_dense_or_new_tensor_are_all_units() -> None:
    old, new = {"x": base(F32, 500, seed=1)}, {"x": base(F32, 500, seed=2), "y": np.arange(3, dtype=np.uint32)}
    delta = diff(old, new)
    positions, values = changes(old, delta, "x")
    assert (positions == np.arange(500)).all()
    assert (values == new["x"]).all()
    assert changes({}, delta, "y")[1].tolist() == [0, 1, 2]


def test_changes_against_a_base_of_another_shape_are_refused() -> None:
    delta = diff({"x": np.zeros(100)}, {"x": np.ones(100)})
    for held in ({"x": np.zeros(50)}, {"x": np.zeros(100, np.float32)}, {}):
        with pytest.raises(WrongBase):
            changes(held, delta, "x")


@pytest.mark.parametrize("rows", [(0, 101), (100, 200), (5, 3), (-1, 3)])
def test_changes_of_rows_outside_the_tensor_are_refused(rows: tuple[int, int]) -> None:
    old = {"x": np.zeros((100, 64), np.uint8)}
    delta = diff(old, {"x": np.ones((100, 64), np.uint8)})
    with pytest.raises(CheckpointError):
        changes(old, delta, "x", rows)
