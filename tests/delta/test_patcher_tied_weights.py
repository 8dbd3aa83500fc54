"""Tied weights: patched once in place, separately in a copy, rejected if they would differ."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from support.patch_checks import BF16, Arrays, check
from support.samples import base, change
from weightwire import (
    CheckpointError,
    diff,
    patch,
)


@pytest.mark.parametrize("threads", [1, 2])
def test_tied_weights_are_patched_once_in_place(threads: int) -> None:
    """One tensor under two names must be changed once."""
    old, new = base(BF16, 6400).reshape(100, 64), change(base(BF16, 6400), BF16, "few").reshape(100, 64)
    delta = diff({"embed": old, "head": old}, {"embed": new, "head": new})
    weights = {"embed": old, "head": old}
    patch(weights, delta, threads=threads)
    assert weights["embed"] is weights["head"]
    assert (old == new).all()


def test_three_names_of_the_same_memory_are_patched_once() -> None:
    old, new = base(BF16, 640).reshape(10, 64), change(base(BF16, 640), BF16, "half").reshape(10, 64)

    def names(array: npt.NDArray[Any]) -> Arrays:
        return {"a": array.view(ml_dtypes.bfloat16), "b": array, "c": array}

    delta = diff(names(old), names(new))
    patch(names(old), delta)
    assert (old == new).all()


def test_tied_weights_that_become_different_are_refused_in_place() -> None:
    old = np.zeros(10, np.uint16)
    delta = diff({"a": old, "b": old.copy()}, {"a": old + np.uint16(1), "b": old + np.uint16(2)})
    with pytest.raises(CheckpointError, match="share memory, but get different weights") as caught:
        patch({"a": old, "b": old}, delta)
    assert caught.value.hint == "patch a copy: patch(base, delta, copy=True)"
    assert not old.any()


def test_tensors_that_overlap_are_refused_in_place() -> None:
    memory = np.zeros(20, np.uint16)
    held = {"a": memory[:12], "b": memory[8:]}
    delta = diff(held, {"a": np.ones(12, np.uint16), "b": np.ones(12, np.uint16)})
    with pytest.raises(CheckpointError, match="share memory"):
        patch(held, delta)
    assert not memory.any()


def test_a_tied_weight_that_should_not_change_is_refused_in_place() -> None:
    """The delta was made from weights that were not tied: `head` must not change."""
    old, new = np.zeros(10, np.uint16), np.ones(10, np.uint16)
    delta = diff({"embed": old, "head": old.copy()}, {"embed": new, "head": old.copy()})
    with pytest.raises(CheckpointError):
        patch({"embed": old, "head": old}, delta)
    assert not old.any()


def test_tied_weights_are_both_patched_in_a_copy() -> None:
    old, new = np.zeros((100, 64), np.uint16), np.ones((100, 64), np.uint16)
    result = patch(
        {"embed": old, "head": old}, diff({"embed": old, "head": old}, {"embed": new, "head": new}), copy=True
    )
    assert (result["embed"] == 1).all()
    assert (result["head"] == 1).all()


def test_tied_weights_may_become_different_in_a_copy() -> None:
    old = np.zeros(10, np.uint16)
    check({"embed": old, "head": old}, {"embed": np.ones(10, np.uint16), "head": old})


def test_an_overlap_behind_other_tensors_is_found() -> None:
    """Parts of a fused tensor are between the whole and the part that changes."""
    whole = np.arange(300, dtype=np.float32)
    base = {"qkv": whole, "q": whole[:100], "k": whole[100:200], "v": whole[200:]}
    old = {name: array.copy() for name, array in base.items()}
    new = old | {"v": old["v"] + 1}
    with pytest.raises(CheckpointError, match="share memory"):
        patch(base, diff(old, new))
    assert (whole == np.arange(300)).all()
