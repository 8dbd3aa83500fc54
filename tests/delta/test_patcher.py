"""Applying deltas: bit for bit, in place or to a copy, all of it or nothing."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import weightwire
from support.cases import case
from support.patch_checks import BF16, Arrays, bytes_of, check, check_in_place, shape_of
from support.samples import BASES, CHANGES, base, change, special, units_of
from weightwire import (
    CheckpointError,
    Delta,
    State,
    Tensor,
    WrongBase,
    anchor,
    diff,
    digest,
    patch,
)
from weightwire.delta.decoder import changes
from weightwire.weights.dtypes import DTYPES, Dtype

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@each_dtype
def test_every_change_of_every_dtype_round_trips(dtype: Dtype) -> None:
    shape = shape_of(dtype, 6, 96)
    for number, how in enumerate(CHANGES):
        with case(how):
            old = base(dtype, 576, BASES[number % 5])
            new = change(old, dtype, how, line=96)
            delta = check_in_place({"x": Tensor(dtype, shape, old)}, {"x": Tensor(dtype, shape, new)})
            assert 0 < delta.changed <= 576


@each_dtype
def test_tensors_of_one_dimension_round_trip(dtype: Dtype) -> None:
    shape = shape_of(dtype, 96)
    old = base(dtype, 96)
    new = change(old, dtype, "half")
    check_in_place({"x": Tensor(dtype, shape, old)}, {"x": Tensor(dtype, shape, new)})
    check({}, {"x": Tensor(dtype, shape, new)})


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.bits >= 8], ids=lambda dtype: dtype.name)
def test_tensors_of_every_small_size_round_trip(dtype: Dtype) -> None:
    for count, how in product((1, 2, 63, 64, 65, 255, 256, 257, 1000), ("one", "half", "all")):
        with case(count, how):
            old = base(dtype, count)
            check({"x": Tensor(dtype, (count,), old)}, {"x": Tensor(dtype, (count,), change(old, dtype, how))})


@each_dtype
def test_scalars_and_empty_tensors_round_trip(dtype: Dtype) -> None:
    one = shape_of(dtype, 1, 1) if dtype.bits < 8 else ()
    if dtype.bits == 6:
        one = (4, 1, 1)  # three bytes
    nbytes = dtype.nbytes(one)
    assert nbytes
    old, new = ({"one": (dtype.name, one, bytearray([fill] * nbytes))} for fill in (1, 2))
    check_in_place(old, new)
    empty: dict[str, Any] = {"none": (dtype.name, (0,), b""), "row": (dtype.name, (3, 0), b"")}
    assert check({}, empty).entries["row"].changed == 0
    assert not check(empty, empty).entries
    check(empty, {"none": (dtype.name, one, new["one"][2])})


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_every_special_number_can_become_every_other(name: str) -> None:
    """NaN payloads, both zeros, infinities and denormals."""
    dtype = DTYPES[name]
    numbers = units_of(special(dtype), dtype)
    old, new = (grid.reshape(-1).copy() for grid in np.meshgrid(numbers, numbers))
    for how in ({}, {"coo": True}):
        check_in_place({"x": Tensor(dtype, (len(old),), old.copy())}, {"x": Tensor(dtype, (len(old),), new)}, **how)


def test_nan_payloads_survive_as_numpy_floats() -> None:
    old = np.array([np.nan, 1.0, -0.0, np.inf], np.float32)
    new = old.copy()
    new.view(np.uint32)[0] = 0x7FC12345
    new[2], new[3] = 0.0, -np.inf
    result = patch({"x": old}, diff({"x": old}, {"x": new}), copy=True)["x"]
    assert result.view(np.uint32).tolist() == [0x7FC12345, 0x3F800000, 0x00000000, 0xFF800000]


def test_tensors_may_be_added_removed_reshaped_and_retyped_in_a_copy() -> None:
    old: Arrays = {
        "same": np.arange(9.0),
        "gone": np.zeros(4),
        "shape": np.arange(12, dtype=np.int16).reshape(3, 4),
        "dtype": np.arange(4, dtype=np.int32),
        "emptied": np.ones((2, 3), np.float16),
    }
    new: Arrays = {
        "same": old["same"],
        "added": np.arange(200, dtype=np.float16).reshape(2, 100),
        "shape": np.arange(12, dtype=np.int16).reshape(4, 3),
        "dtype": old["dtype"].view(np.float32),
        "emptied": np.ones((2, 0), np.float16),
    }
    delta = check(old, new)
    assert set(delta.entries) == {"added", "shape", "dtype", "emptied"}
    result = patch(old, delta, copy=True)
    assert {name: (a.dtype, a.shape) for name, a in result.items()} == {n: (a.dtype, a.shape) for n, a in new.items()}


def test_all_tensors_may_be_added_or_removed() -> None:
    weights = {"x": np.arange(100.0), "y": np.arange(5, dtype=np.uint8)}
    check({}, weights)
    assert check(weights, {}).removed == ("x", "y")


@pytest.mark.parametrize("change_it", ["add", "remove", "reshape"])
def test_tensors_cannot_be_added_removed_or_reshaped_in_place(change_it: str) -> None:
    old: Arrays = {"a": np.zeros(6), "b": np.zeros(6)}
    new: Arrays = {"a": np.ones(6), "b": np.zeros(6)}
    if change_it == "add":
        new["c"] = np.zeros(3)
    elif change_it == "remove":
        del new["b"]
    else:
        new["b"] = np.zeros((2, 3))
    with pytest.raises(CheckpointError, match="cannot be added, removed or reshaped in place") as caught:
        patch(old, diff(old, new))
    assert caught.value.hint == "patch a copy: patch(base, delta, copy=True)"
    assert not old["a"].any()


def test_an_anchor_needs_no_base() -> None:
    weights = {"x": base(BF16, 6400).reshape(100, 64), "y": np.array(3.0)}
    made = anchor(weights)
    assert bytes_of(patch({}, made, copy=True)) == bytes_of(weights)
    assert bytes_of(patch({"other": np.zeros(9)}, made, copy=True)) == bytes_of(weights)


def test_an_anchor_can_be_applied_in_place() -> None:
    weights = {"x": base(BF16, 6400).reshape(100, 64)}
    other = {"x": np.zeros((100, 64), np.uint16)}
    patch(other, anchor(weights))
    assert bytes_of(other) == bytes_of(weights)


def test_an_anchor_in_place_refuses_a_base_with_more_tensors() -> None:
    """An anchor holds all weights of a version, so other tensors would have to be removed."""
    weights = {"x": np.zeros(10, np.uint8), "more": np.zeros(3, np.uint8)}
    with pytest.raises(CheckpointError, match="'more': cannot be added, removed or reshaped"):
        patch(weights, anchor({"x": np.ones(10, np.uint8)}))
    assert not weights["x"].any()


def test_positions_and_values_may_be_applied_twice() -> None:
    old = {"x": base(BF16, 6400).reshape(100, 64)}
    new = {"x": change(base(BF16, 6400), BF16, "few").reshape(100, 64)}
    delta = check(old, new, coo=True)
    assert delta.entries["x"].coo
    positions, values = changes({}, delta, "x")
    target = new["x"].reshape(-1).copy()
    target[positions] = values
    assert target.tobytes() == new["x"].tobytes()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_result_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    old = np.tile(base(BF16, 1 << 16), 160)
    new = old.copy()
    new[::1009] += 1
    held, moved = {"x": old.reshape(-1, 1024), "y": old[:100].copy()}, {"x": new.reshape(-1, 1024), "y": new[:100]}
    patch(held, diff(held, moved), threads=threads)
    assert bytes_of(held) == bytes_of(moved)


def test_deltas_are_applied_without_the_kernel(without_kernel: None) -> None:
    old = {"x": base(BF16, 6400).reshape(100, 64), "y": np.zeros(3), "z": np.arange(700.0)}
    new = {"x": change(base(BF16, 6400), BF16, "rows", line=64).reshape(100, 64), "y": np.ones(3), "w": np.arange(9)}
    check(old, new)
    check(old, new, coo=True)
    patch(old, diff(old, {**old, "x": new["x"]}))
    assert bytes_of(old)["x"] == new["x"].tobytes()


def test_a_known_state_saves_the_scan() -> None:
    old, new = {"x": np.arange(100.0)}, {"x": np.arange(100.0) + 1}
    delta = diff(old, new)
    state = digest(old)
    patch(old, delta, before=state)
    assert bytes_of(old) == bytes_of(new)
    with pytest.raises(WrongBase):
        patch(new, delta, before=delta.advance(state))
    with pytest.raises(WrongBase):
        patch(new, delta, before=State({}))


def test_an_empty_state_is_a_known_state() -> None:
    """The caller gave a wrong state. The right one must not be computed instead."""
    old, new = {"x": np.arange(100.0)}, {"x": np.arange(100.0) + 1}
    with pytest.raises(WrongBase, match="missing in the state `before`"):
        patch(old, diff(old, new), before=State({}))
    assert (old["x"] == np.arange(100.0)).all()


def test_another_base_is_rejected() -> None:
    old, new = {"x": np.zeros(100)}, {"x": np.ones(100)}
    other = {"x": np.full(100, 2.0)}
    with pytest.raises(WrongBase, match="made for weights with state") as caught:
        patch(other, diff(old, new))
    assert caught.value.hint
    assert (other["x"] == 2).all()


def test_a_delta_cannot_be_applied_twice() -> None:
    old, new = {"x": np.zeros(100)}, {"x": np.ones(100)}
    delta = diff(old, new)
    patch(old, delta)
    with pytest.raises(WrongBase):
        patch(old, delta)
    assert bytes_of(old) == bytes_of(new)


@pytest.mark.parametrize(
    ("base_has", "reason"),
    [
        ({}, "missing in the base"),
        ({"x": np.zeros((10, 10))}, r"is F64 \[100\], but F64 \[10, 10\] in the base"),
        ({"x": np.zeros(100, np.float32)}, "but F32"),
        ({"x": np.zeros(100), "y": np.zeros(1)}, "made for weights with state"),
    ],
)
def test_a_base_with_other_tensors_is_refused(base_has: Arrays, reason: str) -> None:
    delta = Delta.from_bytes(diff({"x": np.zeros(100)}, {"x": np.ones(100)}).to_bytes(), "step-7.safetensors")
    with pytest.raises(WrongBase, match=reason) as caught:
        patch(base_has, delta, copy=True)
    assert caught.value.message.startswith("step-7.safetensors: ")


def test_an_empty_state_stands_for_no_weights() -> None:
    assert patch({}, diff({}, {}), copy=True, before=State({})) == {}


def test_an_anchor_in_place_refuses_other_tensors() -> None:
    delta = weightwire.anchor({"a": np.ones(3)})
    with pytest.raises(CheckpointError, match="tensor 'b'"):
        patch({"a": np.zeros(3), "b": np.zeros(3)}, delta)
