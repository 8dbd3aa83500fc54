"""Applying deltas: bit for bit, in place or to a copy, all of it or nothing."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

import weightwire
from support.samples import BASES, CHANGES, base, change, special, units_of, words
from weightwire import (
    CheckpointError,
    CorruptDelta,
    Delta,
    State,
    Tensor,
    WrongBase,
    anchor,
    codec,
    diff,
    digest,
    patch,
)
from weightwire.codec.block_layout import BLOCK
from weightwire.delta.decoder import changes
from weightwire.delta.patcher import apply_in_place, patch_checkpoint
from weightwire.weights.dtypes import DTYPES, Dtype

Arrays = dict[str, npt.NDArray[Any]]
BF16, F32, U8, U16 = (DTYPES[name] for name in ("BF16", "F32", "U8", "U16"))

each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def shape_of(dtype: Dtype, *shape: int) -> tuple[int, ...]:
    """A shape of so many units."""
    return (*shape[:-1], shape[-1] * 8 * dtype.unit // dtype.bits)


def tensor(dtype: Dtype, shape: tuple[int, ...], bits: Any) -> Tensor:
    return Tensor(dtype, shape, bits)


def bytes_of(weights: Any) -> dict[str, bytes]:
    return {name: t.bits.tobytes() for name, t in weightwire.weights.read_weights(weights).items()}


def check(old: dict[str, Any], new: dict[str, Any], **how: Any) -> Delta:
    """That the delta turns `old` into `new` in a copy, and leaves `old` alone."""
    before = bytes_of(old)
    delta = Delta.from_bytes(diff(old, new, **how).to_bytes())
    result = patch(old, delta, copy=True)
    assert bytes_of(result) == bytes_of(new)
    assert digest(result).hex == delta.after
    assert bytes_of(old) == before
    return delta


def check_in_place(old: dict[str, Any], new: dict[str, Any], **how: Any) -> Delta:
    """The same, and in place as well."""
    delta = check(old, new, **how)
    assert patch(old, delta) is old
    assert bytes_of(old) == bytes_of(new)
    return delta


# Every dtype, every kind of change


@each_dtype
@pytest.mark.parametrize("how", CHANGES)
def test_every_dtype_and_every_change(dtype: Dtype, how: str) -> None:
    shape = shape_of(dtype, 6, 96)
    old = base(dtype, 576, BASES[CHANGES.index(how) % 5])
    new = change(old, dtype, how, line=96)
    delta = check_in_place({"x": tensor(dtype, shape, old)}, {"x": tensor(dtype, shape, new)})
    assert 0 < delta.changed <= 576


@each_dtype
def test_one_dimension(dtype: Dtype) -> None:
    shape = shape_of(dtype, 96)
    old = base(dtype, 96)
    new = change(old, dtype, "half")
    check_in_place({"x": tensor(dtype, shape, old)}, {"x": tensor(dtype, shape, new)})
    check({}, {"x": tensor(dtype, shape, new)})


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.bits >= 8], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 255, 256, 257, 1000])
def test_every_size(dtype: Dtype, count: int) -> None:
    old = base(dtype, count)
    for how in ("one", "half", "all"):
        check({"x": tensor(dtype, (count,), old)}, {"x": tensor(dtype, (count,), change(old, dtype, how))})


@each_dtype
def test_no_dimension_and_no_element(dtype: Dtype) -> None:
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
def test_from_every_special_number_to_every_other(name: str) -> None:
    """NaN payloads, both zeros, infinities and denormals are bits like all others."""
    dtype = DTYPES[name]
    numbers = units_of(special(dtype), dtype)
    old, new = (grid.reshape(-1).copy() for grid in np.meshgrid(numbers, numbers))
    for how in ({}, {"coo": True}):
        check_in_place({"x": tensor(dtype, (len(old),), old.copy())}, {"x": tensor(dtype, (len(old),), new)}, **how)


def test_nan_payloads_survive_as_numpy_floats() -> None:
    old = np.array([np.nan, 1.0, -0.0, np.inf], np.float32)
    new = old.copy()
    new.view(np.uint32)[0] = 0x7FC12345
    new[2], new[3] = 0.0, -np.inf
    result = patch({"x": old}, diff({"x": old}, {"x": new}), copy=True)["x"]
    assert result.view(np.uint32).tolist() == [0x7FC12345, 0x3F800000, 0x00000000, 0xFF800000]


# Tensors that come, go and change


def test_added_removed_reshaped_and_of_another_dtype() -> None:
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


def test_everything_comes_and_everything_goes() -> None:
    weights = {"x": np.arange(100.0), "y": np.arange(5, dtype=np.uint8)}
    check({}, weights)
    assert check(weights, {}).removed == ("x", "y")


@pytest.mark.parametrize("change_it", ["add", "remove", "reshape"])
def test_in_place_nothing_can_come_go_or_change_its_shape(change_it: str) -> None:
    old: Arrays = {"a": np.zeros(6), "b": np.zeros(6)}
    new: Arrays = {"a": np.ones(6), "b": np.zeros(6)}
    if change_it == "add":
        new["c"] = np.zeros(3)
    elif change_it == "remove":
        del new["b"]
    else:
        new["b"] = np.zeros((2, 3))
    with pytest.raises(CheckpointError, match="cannot be done in place") as caught:
        patch(old, diff(old, new))
    assert caught.value.hint == "patch a copy: patch(base, delta, copy=True)"
    assert not old["a"].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_tied_names_in_place(threads: int) -> None:
    """One tensor under two names, as embeddings are: it must be changed once."""
    old, new = base(BF16, 6400).reshape(100, 64), change(base(BF16, 6400), BF16, "few").reshape(100, 64)
    delta = diff({"embed": old, "head": old}, {"embed": new, "head": new})
    weights = {"embed": old, "head": old}
    patch(weights, delta, threads=threads)
    assert weights["embed"] is weights["head"]
    assert (old == new).all()


def test_three_names_and_one_of_them_as_another_dtype() -> None:
    old, new = base(BF16, 640).reshape(10, 64), change(base(BF16, 640), BF16, "half").reshape(10, 64)

    def names(array: npt.NDArray[Any]) -> Arrays:
        return {"a": array.view(ml_dtypes.bfloat16), "b": array, "c": array}

    delta = diff(names(old), names(new))
    patch(names(old), delta)
    assert (old == new).all()


def test_names_of_the_same_memory_that_part_in_place() -> None:
    old = np.zeros(10, np.uint16)
    delta = diff({"a": old, "b": old.copy()}, {"a": old + np.uint16(1), "b": old + np.uint16(2)})
    with pytest.raises(CheckpointError, match="share memory, but become different weights") as caught:
        patch({"a": old, "b": old}, delta)
    assert caught.value.hint == "patch a copy: patch(base, delta, copy=True)"
    assert not old.any()


def test_names_that_share_some_memory() -> None:
    memory = np.zeros(20, np.uint16)
    held = {"a": memory[:12], "b": memory[8:]}
    delta = diff(held, {"a": np.ones(12, np.uint16), "b": np.ones(12, np.uint16)})
    with pytest.raises(CheckpointError, match="share memory"):
        patch(held, delta)
    assert not memory.any()


def test_a_name_of_the_same_memory_that_is_to_stay() -> None:
    """Made from weights that were not tied; its state says that `head` does not change."""
    old, new = np.zeros(10, np.uint16), np.ones(10, np.uint16)
    delta = diff({"embed": old, "head": old.copy()}, {"embed": new, "head": old.copy()})
    with pytest.raises(CheckpointError):
        patch({"embed": old, "head": old}, delta)
    assert not old.any()


def test_tied_names_in_a_copy() -> None:
    old, new = np.zeros((100, 64), np.uint16), np.ones((100, 64), np.uint16)
    result = patch(
        {"embed": old, "head": old}, diff({"embed": old, "head": old}, {"embed": new, "head": new}), copy=True
    )
    assert (result["embed"] == 1).all()
    assert (result["head"] == 1).all()


def test_tied_names_that_part() -> None:
    old = np.zeros(10, np.uint16)
    check({"embed": old, "head": old}, {"embed": np.ones(10, np.uint16), "head": old})


# Anchors and coo


def test_an_anchor_needs_no_base() -> None:
    weights = {"x": base(BF16, 6400).reshape(100, 64), "y": np.array(3.0)}
    made = anchor(weights)
    assert bytes_of(patch({}, made, copy=True)) == bytes_of(weights)
    assert bytes_of(patch({"other": np.zeros(9)}, made, copy=True)) == bytes_of(weights)


def test_an_anchor_in_place() -> None:
    weights = {"x": base(BF16, 6400).reshape(100, 64)}
    other = {"x": np.zeros((100, 64), np.uint16)}
    patch(other, anchor(weights))
    assert bytes_of(other) == bytes_of(weights)


def test_an_anchor_in_place_of_more_than_it_holds() -> None:
    """All weights of a version are in it: what else there is would have to go."""
    weights = {"x": np.zeros(10, np.uint8), "more": np.zeros(3, np.uint8)}
    with pytest.raises(CheckpointError, match="'more': is added, removed or reshaped"):
        patch(weights, anchor({"x": np.ones(10, np.uint8)}))
    assert not weights["x"].any()


def test_coo_twice_is_harmless() -> None:
    old = {"x": base(BF16, 6400).reshape(100, 64)}
    new = {"x": change(base(BF16, 6400), BF16, "few").reshape(100, 64)}
    delta = check(old, new, coo=True)
    assert delta.entries["x"].coo
    positions, values = changes({}, delta, "x")
    target = new["x"].reshape(-1).copy()
    target[positions] = values
    assert target.tobytes() == new["x"].tobytes()


# What holds the weights


def test_buffers_in_place() -> None:
    memory = bytearray(b"?" + base(F32, 64).tobytes())
    old = {"x": ("F32", (64,), memoryview(memory)[1:])}
    new = {"x": ("F32", (64,), change(base(F32, 64), F32, "half").tobytes())}
    patch(old, diff(old, new))
    assert memory == b"?" + new["x"][2]


def test_a_copy_is_of_the_kind_that_was_given() -> None:
    arrays = {
        "array": np.zeros((2, 3), np.float32),
        "bf16": np.zeros(4, ml_dtypes.bfloat16),
        "buffer": ("F32", (2,), bytes(8)),
        "tensor": tensor(U8, (3,), np.zeros(3, np.uint8)),
    }
    moved = {
        "array": np.ones((2, 3), np.float32),
        "bf16": np.ones(4, ml_dtypes.bfloat16),
        "buffer": ("F32", (2,), b"\1" * 8),
        "tensor": tensor(U8, (3,), np.ones(3, np.uint8)),
    }
    result = patch(arrays, diff(arrays, moved), copy=True)
    assert result["array"].dtype == np.float32
    assert result["array"].shape == (2, 3)
    assert result["bf16"].dtype == ml_dtypes.bfloat16
    assert result["buffer"][:2] == ("F32", (2,))
    assert bytes(result["buffer"][2]) == b"\1" * 8
    assert isinstance(result["tensor"], Tensor)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    old = {
        "bf16": torch.arange(6400).to(torch.bfloat16).reshape(100, 64),
        "fp8": torch.arange(64).to(torch.float8_e4m3fn),
        "fp32": torch.zeros(3, 4),
        "scalar": torch.tensor(5),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
    }
    new = {name: t.clone() for name, t in old.items()}
    new["bf16"][3, 4] = float("nan")
    new["fp8"][7] = -1.0
    new["fp32"] -= 0.5
    new["scalar"] += 1
    new["bool"] = ~new["bool"]
    new["complex"] *= 2
    delta = diff(old, new)

    result = patch(old, delta, copy=True)
    assert {name: (t.dtype, t.shape) for name, t in result.items()} == {n: (t.dtype, t.shape) for n, t in old.items()}
    assert bytes_of(result) == bytes_of(new)
    pointers = {name: t.data_ptr() for name, t in old.items()}
    patch(old, delta)
    assert bytes_of(old) == bytes_of(new)
    assert {name: t.data_ptr() for name, t in old.items()} == pointers


def test_a_torch_module_with_tied_weights() -> None:
    torch = pytest.importorskip("torch")

    def model() -> Any:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50, bias=False))
        layers[1].weight = layers[0].weight
        return layers

    trained, served = model(), model()
    with torch.no_grad():
        trained[0].weight[3] += 1e-3
    delta = diff(served, trained)
    assert set(delta.entries) == {"0.weight", "1.weight"}
    assert patch(served, delta) is served
    assert bytes_of(served) == bytes_of(trained)


def test_read_only_weights_are_not_changed_in_place() -> None:
    old = {"x": np.zeros(10, np.uint8)}
    delta = diff(old, {"x": np.ones(10, np.uint8)})
    old["x"].flags.writeable = False
    with pytest.raises(CheckpointError, match=r"'x': is read-only") as caught:
        patch(old, delta)
    assert caught.value.hint
    assert (patch(old, delta, copy=True)["x"] == 1).all()


def test_a_delta_may_be_an_object_its_bytes_or_a_path(tmp_path: Path) -> None:
    old, new = {"x": np.zeros(10, np.uint8)}, {"x": np.ones(10, np.uint8)}
    delta = diff(old, new)
    delta.write(tmp_path / "d")
    data = delta.to_bytes()
    ways: list[Any] = [delta, data, bytearray(data), memoryview(data), tmp_path / "d", str(tmp_path / "d")]
    for given in ways:
        assert (patch(old, given, copy=True)["x"] == 1).all()


def test_weights_and_delta_in_the_wrong_order() -> None:
    weights = {"x": np.zeros(10, np.uint8)}
    with pytest.raises(CheckpointError, match="a dict is no delta"):
        patch(diff(weights, weights), weights)  # type: ignore[arg-type]


def test_a_checkpoint_on_disk_is_patched_in_memory(tmp_path: Path) -> None:
    old, new = {"x": np.zeros((10, 8), np.float32)}, {"x": np.ones((10, 8), np.float32)}
    safetensors.numpy.save_file(old, tmp_path / "old.safetensors")
    delta = diff(tmp_path / "old.safetensors", new)
    assert bytes_of(patch(tmp_path / "old.safetensors", delta, copy=True)) == bytes_of(new)
    with pytest.raises(CheckpointError, match="read-only"):
        patch(tmp_path / "old.safetensors", delta)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(threads: int) -> None:
    old = np.tile(base(BF16, 1 << 16), 160)
    new = old.copy()
    new[::1009] += 1
    held, moved = {"x": old.reshape(-1, 1024), "y": old[:100].copy()}, {"x": new.reshape(-1, 1024), "y": new[:100]}
    patch(held, diff(held, moved), threads=threads)
    assert bytes_of(held) == bytes_of(moved)


def test_without_the_kernel(without_kernel: None) -> None:
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


# Shards


def shard(array: npt.NDArray[Any], first: int, last: int) -> dict[str, Tensor]:
    rows = array[first:last].reshape(-1).view(np.uint16)
    return {"x": Tensor(U16, array.shape, rows, (first, last))}


@pytest.fixture
def ranks() -> tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]:
    """A tensor before and after, and the deltas of the two ranks that hold half of it each."""
    old = words(1, 1600).view(np.uint16).reshape(100, 64)
    new = old.copy()
    new[[3, 49, 50, 99], [1, 2, 3, 4]] ^= 1
    return old, new, [diff(shard(old, *rows), shard(new, *rows)) for rows in ((0, 50), (50, 100))]


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


def test_rows_that_the_base_lacks(ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]]) -> None:
    old, new, deltas = ranks
    for held in (shard(old, 0, 50), shard(old, 60, 100)):
        with pytest.raises(WrongBase, match="lacks some of its rows"):
            patch(held, deltas[1], copy=True)
    with pytest.raises(WrongBase, match="lacks some of its rows"):
        patch(shard(old, 0, 50), diff({"x": old}, {"x": new}), copy=True)


def test_rows_of_a_new_tensor() -> None:
    made = anchor(shard(words(1, 1600).view(np.uint16).reshape(100, 64), 10, 20))
    with pytest.raises(CheckpointError, match="rows 10 to 20 of a new tensor only"):
        patch({}, made, copy=True)
    held = shard(np.zeros((100, 64), np.uint16), 10, 20)
    patch(held, made)
    assert held["x"].bits.tobytes() == words(1, 1600).view(np.uint16).reshape(100, 64)[10:20].tobytes()


# The wrong base


def test_another_base() -> None:
    old, new = {"x": np.zeros(100)}, {"x": np.ones(100)}
    other = {"x": np.full(100, 2.0)}
    with pytest.raises(WrongBase, match="was made for weights with state") as caught:
        patch(other, diff(old, new))
    assert caught.value.hint
    assert (other["x"] == 2).all()


def test_a_delta_applied_twice() -> None:
    old, new = {"x": np.zeros(100)}, {"x": np.ones(100)}
    delta = diff(old, new)
    patch(old, delta)
    with pytest.raises(WrongBase):
        patch(old, delta)
    assert bytes_of(old) == bytes_of(new)


@pytest.mark.parametrize(
    ("base_has", "reason"),
    [
        ({}, "has no such tensor"),
        ({"x": np.zeros((10, 10))}, r"is F64 \[100\], but F64 \[10, 10\] in the base"),
        ({"x": np.zeros(100, np.float32)}, "but F32"),
        ({"x": np.zeros(100), "y": np.zeros(1)}, "was made for weights with state"),
    ],
)
def test_a_base_with_other_tensors(base_has: Arrays, reason: str) -> None:
    delta = Delta.from_bytes(diff({"x": np.zeros(100)}, {"x": np.ones(100)}).to_bytes(), "step-7.safetensors")
    with pytest.raises(WrongBase, match=reason) as caught:
        patch(base_has, delta, copy=True)
    assert caught.value.message.startswith("step-7.safetensors: ")


# All or nothing


def three_tensors() -> tuple[Arrays, Arrays]:
    old = {name: base(BF16, 640 * 100, seed=i).reshape(640, 100) for i, name in enumerate("abc")}
    return old, {name: change(array.reshape(-1), BF16, "few").reshape(640, 100) for name, array in old.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_patch_that_fails_half_way_leaves_everything_as_it_was(threads: int, name: str) -> None:
    old, new = three_tensors()
    delta = diff(old, new)
    data = bytearray(delta.to_bytes())
    begin, end = delta.byte_range(name)
    data[(begin + end) // 2] ^= 0x10
    before = bytes_of(old)
    with pytest.raises(CorruptDelta, match=f"delta: tensor '{name}'"):
        patch(old, bytes(data), threads=threads)
    assert bytes_of(old) == before
    patch(old, delta)
    assert bytes_of(old) == bytes_of(new)


def test_every_block_is_put_back() -> None:
    """The last block of several is the one that fails."""
    old = {"x": np.zeros(3 * BLOCK, np.uint8)}
    new = {"x": old["x"].copy()}
    new["x"][:: BLOCK // 4] = 1
    delta = diff(old, new)
    data = bytearray(delta.to_bytes())
    data[-3] ^= 1
    for threads in (1, 2):
        with pytest.raises(CorruptDelta):
            patch(old, bytes(data), threads=threads)
        assert not old["x"].any()


def test_a_dense_block_is_put_back() -> None:
    old = {"a": base(F32, 5000), "b": base(F32, 5000)}
    new = {"a": old["a"] + np.uint32(1000) + (old["a"] & np.uint32(0xFF)), "b": old["b"] ^ np.uint32(1)}
    delta = diff(old, new)
    data = bytearray(delta.to_bytes())
    data[delta.byte_range("b")[1] - 1] ^= 0x80
    before = bytes_of(old)
    with pytest.raises(CorruptDelta):
        patch(old, bytes(data))
    assert bytes_of(old) == before


def test_a_reader_that_fails_half_way() -> None:
    old, new = three_tensors()
    data = diff(old, new).to_bytes()
    asked = 0

    def read(begin: int, end: int) -> bytes:
        nonlocal asked
        asked += 1
        if asked > 4:
            raise ConnectionError("gone")
        return data[begin:end]

    before = bytes_of(old)
    with pytest.raises(ConnectionError):
        patch(old, Delta.remote(read, len(data), "far"))
    assert bytes_of(old) == before


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_half_way(threads: int) -> None:
    """Ctrl-C while blocks are fetched: nothing is changed when it comes out."""
    old, new = three_tensors()
    delta = diff(old, new)
    data, last = delta.to_bytes(), delta.byte_range("c")

    def read(begin: int, end: int) -> bytes:
        if (begin, end) == last:
            os.kill(os.getpid(), signal.SIGINT)
        return data[begin:end]

    before = bytes_of(old)
    with pytest.raises(KeyboardInterrupt):
        patch(old, Delta.remote(read, len(data), "far"), threads=threads)
    assert bytes_of(old) == before
    patch(old, delta)
    assert bytes_of(old) == bytes_of(new)


# On disk


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Delta, Arrays]:
    old: Arrays = {"x": np.arange(6400, dtype=np.float32).reshape(100, 64), "y": np.zeros(9, np.float16)}
    new: Arrays = {"x": old["x"] + 1, "z": np.ones(3)}
    safetensors.numpy.save_file(old, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors", diff(old, new), new


def test_a_checkpoint(saved: tuple[Path, Delta, Arrays], tmp_path: Path) -> None:
    path, delta, new = saved
    state = patch_checkpoint(path, delta, tmp_path / "new.safetensors")
    assert state == digest(new)
    assert bytes_of(tmp_path / "new.safetensors") == bytes_of(new)
    assert digest(path).hex == delta.before


def damaged(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


@pytest.mark.parametrize(
    "harm",
    [damaged, lambda data: data[:-1], lambda data: data + b"\0", lambda data: data[:300]],
    ids=["flipped", "cut", "longer", "header only"],
)
def test_a_bad_delta_leaves_the_output_untouched(
    saved: tuple[Path, Delta, Arrays], tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    path, delta, _ = saved
    precious = path.read_bytes()
    (tmp_path / "bad").write_bytes(harm(delta.to_bytes()))
    for out in (tmp_path / "new.safetensors", tmp_path / "there.safetensors"):
        if out.name == "there.safetensors":
            out.write_bytes(precious)
        listed = sorted(os.listdir(tmp_path))
        with pytest.raises(CorruptDelta, match=str(tmp_path / "bad")):
            patch_checkpoint(path, tmp_path / "bad", out)
        assert sorted(os.listdir(tmp_path)) == listed
    assert (tmp_path / "there.safetensors").read_bytes() == precious


def test_the_wrong_checkpoint(saved: tuple[Path, Delta, Arrays], tmp_path: Path) -> None:
    _, delta, new = saved
    safetensors.numpy.save_file(new, tmp_path / "other.safetensors")
    with pytest.raises(WrongBase):
        patch_checkpoint(tmp_path / "other.safetensors", delta, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_progress_hears_of_every_byte_twice(saved: tuple[Path, Delta, Arrays], tmp_path: Path) -> None:
    path, delta, _ = saved
    heard: list[int] = []
    patch_checkpoint(path, delta, tmp_path / "new.safetensors", progress=heard.append)
    assert sum(heard) == (6400 * 4 + 9 * 2) + 6400 * 4  # digested, and copied but for what is gone


# Changes of single tensors and rows


def test_changes_of_rows() -> None:
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


def test_changes_of_a_tensor_that_did_not_change() -> None:
    old = {"x": np.zeros(10, np.uint16), "y": np.zeros(10, np.uint16)}
    positions, values = changes(old, diff(old, {"x": np.ones(10, np.uint16), "y": old["y"]}), "y")
    assert (len(positions), len(values)) == (0, 0)
    assert values.dtype == np.uint16


def test_changes_of_a_packed_tensor_count_its_bytes() -> None:
    old, new = {"x": ("F4", (200,), bytes(100))}, {"x": ("F4", (200,), bytes(70) + b"X" + bytes(29))}
    positions, values = changes(old, diff(old, new), "x")
    assert (positions.tolist(), values.tolist()) == ([70], [ord("X")])


def test_changes_of_a_shard_count_from_the_tensors_beginning(
    ranks: tuple[npt.NDArray[Any], npt.NDArray[Any], list[Delta]],
) -> None:
    old, _, deltas = ranks
    assert changes({"x": old}, deltas[1], "x")[0].tolist() == [50 * 64 + 3, 99 * 64 + 4]
    assert changes(shard(old, 50, 100), deltas[1], "x", (99, 100))[0].tolist() == [99 * 64 + 4]


def test_changes_of_a_dense_or_new_tensor_are_all_of_it() -> None:
    old, new = {"x": base(F32, 500, seed=1)}, {"x": base(F32, 500, seed=2), "y": np.arange(3, dtype=np.uint32)}
    delta = diff(old, new)
    positions, values = changes(old, delta, "x")
    assert (positions == np.arange(500)).all()
    assert (values == new["x"]).all()
    assert changes({}, delta, "y")[1].tolist() == [0, 1, 2]


def test_changes_against_a_base_of_another_shape() -> None:
    delta = diff({"x": np.zeros(100)}, {"x": np.ones(100)})
    for held in ({"x": np.zeros(50)}, {"x": np.zeros(100, np.float32)}, {}):
        with pytest.raises(WrongBase):
            changes(held, delta, "x")


@pytest.mark.parametrize("rows", [(0, 101), (100, 200), (5, 3), (-1, 3)])
def test_changes_of_rows_that_are_not_there(rows: tuple[int, int]) -> None:
    old = {"x": np.zeros((100, 64), np.uint8)}
    delta = diff(old, {"x": np.ones((100, 64), np.uint8)})
    with pytest.raises(CheckpointError):
        changes(old, delta, "x", rows)


# More than 2^32 elements


ROWS = (1 << 20) + 1
AT = [0, 5, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 4096 * ROWS - 1]
TO = [0x38, 0x80, 0x7F, 0x01, 0xFF, 0x40]


@pytest.fixture
def huge() -> tuple[Arrays, Arrays]:
    """Zeros that are never allocated: pages that nobody wrote to are all the same page."""
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    try:
        if overcommit.exists() and overcommit.read_text().strip() == "2":
            raise MemoryError("vm.overcommit_memory is 2")
        old, new = (np.zeros((ROWS, 4096), np.uint8) for _ in range(2))
    except MemoryError as problem:
        pytest.skip(f"TENSORS BEYOND 2^32 ELEMENTS ARE NOT TESTED: this machine promises no memory ({problem})")
    new.reshape(-1)[AT] = TO
    return {"x": old.view(ml_dtypes.float8_e4m3fn)}, {"x": new.view(ml_dtypes.float8_e4m3fn)}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured on Linux")
@pytest.mark.parametrize("coo", [False, True])
def test_positions_beyond_32_bits(huge: tuple[Arrays, Arrays], coo: bool) -> None:
    old, new = huge
    before = resident()
    delta = diff(old, new, coo=coo)
    assert delta.changed == 6
    assert delta.nbytes < 3000

    positions, values = changes(old, delta, "x")
    assert positions.tolist() == AT
    assert values.tolist() == TO
    assert changes(old, delta, "x", (1 << 20, ROWS))[0].tolist() == AT[3:]

    assert patch(old, delta)["x"].view(np.uint8).reshape(-1)[AT].tolist() == TO
    assert not old["x"].view(np.uint8)[1:1000].any()
    assert resident() - before < 150_000_000


def test_an_empty_state_stands_for_no_weights() -> None:
    assert patch({}, diff({}, {}), copy=True, before=State({})) == {}


# Interrupted, torn, shared


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [0, 3, 5])
def test_an_interrupt_in_place_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, threads: int, block: int
) -> None:
    old = {f"t{i}": np.arange(6400, dtype=np.uint16).reshape(100, 64) for i in range(6)}
    new = {name: array + np.uint16(1) for name, array in old.items()}
    delta = diff(old, new)
    base = {name: array.copy() for name, array in old.items()}
    calls = iter(range(6))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if next(calls) == block:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)  # for the main thread to hear of it
        return result

    real = codec.apply
    monkeypatch.setattr(codec, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch(base, delta, threads=threads)
    assert all((base[name] == old[name]).all() for name in old)


def test_memory_that_is_shared_further_on() -> None:
    """The parts of a fused tensor lie between the whole and the part that changes."""
    whole = np.arange(300, dtype=np.float32)
    base = {"qkv": whole, "q": whole[:100], "k": whole[100:200], "v": whole[200:]}
    old = {name: array.copy() for name, array in base.items()}
    new = old | {"v": old["v"] + 1}
    with pytest.raises(CheckpointError, match="share memory"):
        patch(base, diff(old, new))
    assert (whole == np.arange(300)).all()


def test_an_anchor_in_place_is_all_there_is() -> None:
    delta = weightwire.anchor({"a": np.ones(3)})
    with pytest.raises(CheckpointError, match="tensor 'b'"):
        patch({"a": np.zeros(3), "b": np.zeros(3)}, delta)


def test_weights_that_are_written_to_meanwhile_make_no_crash() -> None:
    """The delta may be wrong, and its digests would show; the process lives."""
    old = np.zeros((512, 512), np.uint16)
    new = old.copy()
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            new[:, ::7] = value
            old[::5] = value % 3

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(60):
            diff({"x": ("BF16", old.shape, old)}, {"x": ("BF16", new.shape, new)})
    finally:
        stop.set()
        thread.join()


def test_torch_hears_of_the_change() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(4, 4))
    product = (weight * weight).sum()
    base = {"w": weight}
    old = {"w": weight.detach().clone()}
    patch(base, diff(old, {"w": old["w"] * 2}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_file_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    old = {"x": np.arange(100_000, dtype=np.uint16)}
    weightwire.anchor(old).write(tmp_path / "a")
    delta = weightwire.Delta.open(tmp_path / "a")
    os.truncate(tmp_path / "a", 4096)
    with pytest.raises(CorruptDelta, match="became shorter"):
        patch({}, delta, copy=True)


# In place, and back


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("coo", [False, True])
def test_the_way_back(threads: int, coo: bool) -> None:
    old, new = three_tensors()
    old["dense"], new["dense"] = base(F32, 640), base(F32, 640, seed=9)
    before, state = bytes_of(old), digest(old)
    applied = apply_in_place(old, diff(old, new, coo=coo), state, threads)
    assert applied.state == digest(new)
    assert bytes_of(old) == bytes_of(new)
    applied.undo()
    assert bytes_of(old) == before
    applied.undo()
    assert bytes_of(old) == before


def test_the_way_back_from_an_anchor() -> None:
    old, new = three_tensors()
    before = bytes_of(old)
    applied = apply_in_place(old, anchor(new))
    assert applied.state == digest(new)
    assert bytes_of(old) == bytes_of(new)
    applied.undo()
    assert bytes_of(old) == before


def test_nothing_kept_and_no_way_back() -> None:
    old, new = three_tensors()
    applied = apply_in_place(old, diff(old, new), keep=False)
    assert applied.state == digest(new)
    assert bytes_of(old) == bytes_of(new)
    with pytest.raises(ValueError, match="nothing was kept"):
        applied.undo()


def test_in_place_with_the_wrong_state() -> None:
    old, new = three_tensors()
    before = bytes_of(old)
    for keep in (True, False):
        with pytest.raises(WrongBase):
            apply_in_place(old, diff(old, new), digest(new), keep=keep)
    assert bytes_of(old) == before


def test_in_place_of_a_damaged_delta() -> None:
    old, new = three_tensors()
    before, data = bytes_of(old), bytearray(diff(old, new).to_bytes())
    data[-5] ^= 4
    with pytest.raises(CorruptDelta):
        apply_in_place(old, bytes(data))
    assert bytes_of(old) == before


def test_torch_hears_of_the_way_back() -> None:
    torch = pytest.importorskip("torch")
    weights = {"w": torch.ones(4, 4)}
    applied = apply_in_place(weights, diff(weights, {"w": torch.zeros(4, 4)}))
    seen = weights["w"]._version
    applied.undo()
    assert weights["w"]._version > seen
    assert (weights["w"] == 1).all()


def test_an_anchor_in_parts() -> None:
    """One file of every rank: rows of some tensors, and the whole of others."""
    new = {"x": words(1, 1600).view(np.uint16).reshape(100, 64), "y": np.arange(9, dtype=np.uint16)}
    files = [anchor({**shard(new["x"], 0, 40), "y": new["y"]}), anchor(shard(new["x"], 40, 100))]
    held = {"x": np.zeros((100, 64), np.uint16), "y": np.zeros(9, np.uint16)}
    for file in files:
        apply_in_place(held, file, keep=False)
    assert bytes_of(held) == bytes_of(new)
    with pytest.raises(CheckpointError, match="added, removed or reshaped"):
        apply_in_place(shard(new["x"], 0, 50), files[1])
