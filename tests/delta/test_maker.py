"""Making deltas and anchors: their entries, reproducible bytes, and sizes."""

from __future__ import annotations

import io
import math
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import weightwire
from support.cases import case
from support.samples import base, change, words
from weightwire import CheckpointError, OutputError, State, Tensor, anchor, diff, digest
from weightwire.codec import block_codec, numpy_kernel
from weightwire.codec.block_layout import BLOCK
from weightwire.weights.dtypes import DTYPES

Arrays = dict[str, npt.NDArray[Any]]
BF16, F32, U16 = (DTYPES[name] for name in ("BF16", "F32", "U16"))


def old_weights() -> Arrays:
    return {
        "embed": base(BF16, 300 * 128, seed=1).view(ml_dtypes.bfloat16).reshape(300, 128),
        "head": base(BF16, 64 * 128, seed=2).view(ml_dtypes.bfloat16).reshape(64, 128),
        "norm": base(F32, 128, seed=3).view(np.float32),
        "steps": np.array(7, np.int64),
        "mask": np.arange(60).reshape(3, 4, 5) % 2 == 0,
    }


def new_weights() -> Arrays:
    """Some rows of the embedding, all of the norm and the counter change. Head and mask do not."""
    old = old_weights()
    return old | {
        "embed": changed(old["embed"], "rows"),
        "norm": changed(old["norm"], "most"),
        "steps": np.array(8, np.int64),
    }


def changed(array: npt.NDArray[Any], how: str) -> npt.NDArray[Any]:
    dtype = BF16 if array.dtype == ml_dtypes.bfloat16 else F32
    bits = change(array.reshape(-1).view(f"<u{array.itemsize}"), dtype, how, line=128)
    return bits.view(array.dtype).reshape(array.shape)


# Entries


def test_entries_are_the_tensors_that_changed_in_the_order_of_their_names() -> None:
    delta = diff(old_weights(), new_weights())
    assert list(delta.entries) == ["embed", "norm", "steps"]
    assert delta.kind == "delta"
    assert delta.before == digest(old_weights()).hex
    assert delta.after == digest(new_weights()).hex
    assert delta.removed == ()


def test_an_entry_counts_the_changes() -> None:
    old, new = old_weights(), new_weights()
    entry = diff(old, new).entries["embed"]
    assert (entry.dtype, entry.shape, entry.rows) == (BF16, (300, 128), None)
    assert (entry.coo, entry.fresh) == (False, False)
    assert entry.changed == int((old["embed"].view(np.uint16) != new["embed"].view(np.uint16)).sum())
    assert entry.digest is None
    assert anchor(new).entries["embed"].digest == digest(new).tensors["embed"].digest


def test_equal_weights_give_an_empty_delta() -> None:
    delta = diff(old_weights(), old_weights())
    assert not delta.entries
    assert delta.before == delta.after
    assert delta.nbytes < 350


def test_no_weights_give_an_empty_delta() -> None:
    delta = diff({}, {})
    assert (delta.changed, delta.before) == (0, State({}).hex)


def test_the_same_value_with_other_bits_is_a_change() -> None:
    """-0 is not 0, and one NaN is not another."""
    old = {"x": np.array([0.0, np.nan, np.nan], np.float32)}
    new = {"x": np.array([-0.0, np.nan, -np.nan], np.float32)}
    assert diff(old, new).changed == 2


def test_added_tensors_are_sent_whole_and_removed_ones_listed() -> None:
    old, new = old_weights(), old_weights()
    new["bias"] = np.ones(3, np.float16)
    del new["norm"], new["mask"]
    delta = diff(old, new)
    assert delta.removed == ("mask", "norm")
    assert list(delta.entries) == ["bias"]
    assert delta.entries["bias"].fresh
    assert delta.entries["bias"].changed == 3
    assert delta.after == digest(new).hex


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12, dtype=np.float32).reshape(4, 3),  # another shape
        np.arange(12, dtype=np.float32),  # fewer dimensions
        np.arange(12, dtype=np.int32).reshape(3, 4),  # another dtype of the same width
        np.arange(12, dtype=np.float64).reshape(3, 4),
        np.float32(1),
        np.zeros((3, 0), np.float32),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_sent_whole(value: Any) -> None:
    new = np.asarray(value)
    delta = diff({"x": np.zeros((3, 4), np.float32)}, {"x": new})
    entry = delta.entries["x"]
    assert entry.fresh
    assert entry.shape == new.shape
    assert entry.changed == new.size
    assert delta.after == digest({"x": new}).hex


def test_one_file_can_hold_every_dtype() -> None:
    def every(seed: int) -> dict[str, tuple[str, tuple[int, int], bytes]]:
        # 4 x 16 elements of any width are whole bytes.
        return {
            name: (name, (4, 16), words(seed + dtype.code, 64).tobytes()[: dtype.nbytes((4, 16))])
            for name, dtype in DTYPES.items()
        }

    delta = diff(every(1), every(100))
    assert set(delta.entries) == set(DTYPES)
    assert delta.after == digest(every(100)).hex


def test_tied_names_are_two_entries() -> None:
    old, new = np.zeros((4, 64), np.float32), np.ones((4, 64), np.float32)
    delta = diff({"embed": old, "head": old}, {"embed": new, "head": new})
    assert list(delta.entries) == ["embed", "head"]
    assert delta.after == digest({"embed": new, "head": new}).hex


def test_an_anchor_has_all_tensors() -> None:
    weights = old_weights() | {"none": np.zeros((2, 0), np.float32)}
    delta = anchor(weights)
    assert delta.kind == "anchor"
    assert set(delta.entries) == set(weights)
    assert all(entry.fresh for entry in delta.entries.values())
    assert (delta.before, delta.after) == ("", digest(weights).hex)


def test_coo_lists_positions_and_values() -> None:
    old = {"x": np.zeros((10, 100), np.float32), "y": np.zeros(5, np.float32)}
    new = {"x": old["x"].copy(), "y": old["y"].copy(), "z": np.ones(3, np.float32)}
    new["x"][3, 4] = new["x"][9, 99] = 1.0
    delta = diff(old, new, coo=True)
    assert list(delta.entries) == ["x", "z"]
    assert (delta.entries["x"].coo, delta.entries["x"].changed) == (True, 2)
    assert delta.entries["z"].fresh
    positions = np.frombuffer(delta.block(delta.stack_of["x"], 0), "<u4", 2, 8)
    assert positions.tolist() == [304, 999]
    assert delta.after == diff(old, new).after


def test_digests_of_two_ranks_add_up_to_that_of_one() -> None:
    """Two ranks with separate rows. Their files add up to the file of one rank."""
    old = words(1, 100 * 16).view(np.uint16).reshape(100, 64)
    new = old.copy()
    new[[3, 50, 99], [1, 2, 3]] += 1

    def shard(array: npt.NDArray[Any], first: int, last: int) -> dict[str, Tensor]:
        return {"x": Tensor(U16, (100, 64), array[first:last].reshape(-1), (first, last))}

    parts = [diff(shard(old, *rows), shard(new, *rows)) for rows in ((0, 50), (50, 100))]
    assert [part.entries["x"].rows for part in parts] == [(0, 50), (50, 100)]
    assert [part.changed for part in parts] == [1, 2]
    assert {text for part in parts for text in (part.before, part.after)} == {""}
    lanes = zip(*(part.entries["x"].digest for part in parts), strict=True)
    assert tuple(sum(lane) % 2**64 for lane in lanes) == digest({"x": new}).tensors["x"].digest


def test_a_part_does_not_name_the_state() -> None:
    """Some of the tensors: the state would need all."""
    weights = {"x": np.arange(9, dtype=np.uint8)}
    whole, part = anchor(weights), anchor(weights, part=True)
    assert whole.after == digest(weights).hex
    assert (part.before, part.after) == ("", "")
    assert part.entries == whole.entries


def test_blocks_that_did_not_change_are_empty() -> None:
    old = {"x": np.zeros(3 * BLOCK, np.uint8)}
    new = {"x": np.zeros(3 * BLOCK, np.uint8)}
    new["x"][2 * BLOCK + 7] = 1
    sizes = diff(old, new).stack_of["x"].blocks
    assert sizes[:2] == (0, 0)
    assert 0 < sizes[2] < 30


def test_progress_counts_every_byte_once() -> None:
    heard: list[int] = []
    diff(old_weights(), new_weights(), progress=heard.append)
    assert sum(heard) == sum(array.nbytes for array in new_weights().values())
    heard.clear()
    anchor(new_weights(), progress=heard.append)
    assert sum(heard) == sum(array.nbytes for array in new_weights().values())


# A known state


def test_a_known_state_gives_the_same_delta() -> None:
    old, new = old_weights(), new_weights()
    assert diff(old, new, before=digest(old)).to_bytes() == diff(old, new).to_bytes()


def test_a_state_advanced_by_a_delta_can_be_used_for_the_next() -> None:
    first, second = old_weights(), new_weights()
    third = second | {"head": changed(second["head"], "few")}
    state = diff(first, second).advance(digest(first))
    assert diff(second, third, before=state).after == digest(third).hex


def test_the_state_of_other_tensors_is_rejected() -> None:
    old = old_weights()
    for other in ({}, {**old, "more": old["norm"]}, {**old, "norm": old["norm"][:-1]}):
        with pytest.raises(CheckpointError, match="does not match the old weights") as caught:
            diff(old, new_weights(), before=digest(other))
        assert caught.value.hint


# Always the same


@pytest.fixture(scope="module")
def large() -> tuple[Arrays, Arrays]:
    """Several tensors and blocks. One block does not change."""
    old = np.tile(base(BF16, 1 << 16), 160)
    new = old.copy()
    new[: BLOCK // 2 : 101] += 1
    new[-BLOCK // 2 :: 77] -= 1
    first = {"large": old.reshape(-1, 1024), **{f"small.{i}": base(F32, 500, seed=i) for i in range(20)}}
    second = {"large": new.reshape(-1, 1024), **{f"small.{i}": base(F32, 500, seed=i // 2) for i in range(20)}}
    return first, second


def test_the_delta_does_not_depend_on_the_number_of_threads(large: tuple[Arrays, Arrays]) -> None:
    old, new = large

    def made(threads: int | None = None) -> list[bytes]:
        deltas = (
            diff(old, new, threads=threads),
            anchor(new, threads=threads),
            diff(old, new, coo=True, threads=threads),
        )
        return [delta.to_bytes() for delta in deltas]

    expected = made()
    for threads in (1, 2, 5):
        with case(threads):
            assert made(threads) == expected


def test_the_order_of_the_mapping_does_not_matter() -> None:
    old, new = old_weights(), new_weights() | {"a": np.zeros(3), "z": np.zeros(4)}
    backwards = [dict(reversed(one.items())) for one in (old, new)]
    assert diff(*backwards).to_bytes() == diff(old, new).to_bytes()
    assert anchor(backwards[1]).to_bytes() == anchor(new).to_bytes()


def test_a_second_diff_is_the_same() -> None:
    assert diff(old_weights(), new_weights()).to_bytes() == diff(old_weights(), new_weights()).to_bytes()


def test_the_delta_is_the_same_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = old_weights(), new_weights()
    new["added"] = base(BF16, 500).reshape(5, 100)
    made = diff(old, new).to_bytes(), anchor(new).to_bytes()
    monkeypatch.setattr(block_codec, "KERNEL", numpy_kernel)
    assert (diff(old, new).to_bytes(), anchor(new).to_bytes()) == made


def test_the_source_of_the_weights_does_not_matter() -> None:
    """NumPy arrays, raw buffers, tensors, buffers at odd addresses."""
    old, new = old_weights(), new_weights()

    def buffers(arrays: Arrays) -> dict[str, Any]:
        read = weightwire.weights.read_weights(arrays)
        return {name: (t.dtype.name, t.shape, memoryview(b"?" + t.bits.tobytes())[1:]) for name, t in read.items()}

    assert diff(buffers(old), new).to_bytes() == diff(old, new).to_bytes()
    tensors = [weightwire.weights.read_weights(one) for one in (old, new)]
    assert diff(*tensors).to_bytes() == diff(old, new).to_bytes()


def test_torch_tensors_give_the_same_delta_as_arrays() -> None:
    torch = pytest.importorskip("torch")
    old, new = old_weights(), new_weights()

    def as_torch(arrays: Arrays) -> dict[str, Any]:
        return {
            name: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
            if a.dtype == ml_dtypes.bfloat16
            else torch.from_numpy(np.asarray(a))
            for name, a in arrays.items()
        }

    assert diff(as_torch(old), as_torch(new)).to_bytes() == diff(old, new).to_bytes()


# In a spool


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_spool_gives_the_same_delta(large: tuple[Arrays, Arrays], buffering: int) -> None:
    old, new = large
    backwards = dict(reversed(new.items()))
    with tempfile.TemporaryFile(buffering=buffering) as spool:
        assert anchor(backwards, spool=spool).to_bytes() == anchor(new).to_bytes()
        assert diff(old, backwards, spool=spool).to_bytes() == diff(old, new).to_bytes()
        assert diff(old, backwards, spool=spool, coo=True).to_bytes() == diff(old, new, coo=True).to_bytes()


def test_existing_content_of_the_spool_is_kept() -> None:
    """One file can hold several deltas, or other content."""
    with tempfile.TemporaryFile() as spool:
        spool.write(b"mine")
        first, second = anchor(old_weights(), spool=spool), anchor(new_weights(), spool=spool)
        assert (first.to_bytes(), second.to_bytes()) == (
            anchor(old_weights()).to_bytes(),
            anchor(new_weights()).to_bytes(),
        )
        assert os.pread(spool.fileno(), 4, 0) == b"mine"
        assert os.fstat(spool.fileno()).st_size == 4 + sum(one.nbytes - len(one.head) for one in (first, second))


def test_a_spooled_anchor_is_read_from_any_thread(large: tuple[Arrays, Arrays]) -> None:
    _, new = large
    with tempfile.TemporaryFile() as spool, ThreadPoolExecutor(4) as pool:
        made = anchor(new, spool=spool)
        chunks = pool.map(lambda at: bytes(made.read(at, min(at + 9999, made.nbytes))), range(0, made.nbytes, 9999))
        assert b"".join(chunks) == anchor(new).to_bytes()


def test_a_spooled_anchor_is_not_in_memory(large: tuple[Arrays, Arrays]) -> None:
    with tempfile.TemporaryFile() as spool:
        made = anchor(large[1], spool=spool)
        assert os.fstat(spool.fileno()).st_size == made.nbytes - len(made.head)
        spool.truncate(0)
        with pytest.raises(weightwire.CorruptDelta, match="temporary file: truncated"):
            made.to_bytes()


def test_a_full_disk_is_reported() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with io.FileIO(full, "r+") as spool, pytest.raises(OutputError, match="No space left") as caught:
        anchor(old_weights(), spool=spool)
    assert caught.value.hint


# Failures


def test_nothing_is_read_after_a_failure(large: tuple[Arrays, Arrays]) -> None:
    """After a failure the caller may overwrite all weights."""
    old, new = large
    before = {*threading.enumerate()}

    def fail(nbytes: int) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        diff(old, new, threads=3, progress=fail)
    assert {thread for thread in threading.enumerate() if thread.name.startswith("weightwire")} <= before


# Sizes


def training_step(late: bool, shape: tuple[int, int] = (4096, 1024)) -> tuple[Arrays, Arrays]:
    """Gaussian bf16 weights. Each changes with the probability that its exponent has in an RL step."""
    random = np.random.default_rng(late)
    scale = 0.02 * np.exp(0.3 * random.standard_normal((shape[0], 1), np.float32))
    old = (random.standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16).view(np.uint16)
    exponents = (old >> 7 & 0xFF).astype(int) - 127
    chances = np.array([0.016, 0.031, 0.063, 0.127, 0.255, 0.487, 0.718, 0.857, 0.928])
    chance = np.where(exponents > -9, 0.016 * 2.0 ** (-9 - exponents) * late, chances[np.clip(-9 - exponents, 0, 8)])
    moved = random.random(shape) < chance
    far = np.where(exponents < -12, random.geometric(0.5, shape), 1)
    step = np.where(random.random(shape) < 0.5, far, -far)
    new = np.where(moved, old.astype(int) + step, old).astype(np.uint16)
    return ({"w": one.view(ml_dtypes.bfloat16)} for one in (old, new))  # type: ignore[return-value]


def conditional_entropy(old: Arrays, new: Arrays) -> float:
    """The entropy in bytes of positions and steps, given the old exponents."""
    was, now = (one["w"].view(np.uint16).reshape(-1).astype(int) for one in (old, new))
    bits = 0.0
    for exponent in np.unique(was >> 7 & 0xFF):
        members = was >> 7 & 0xFF == exponent
        steps = now[members] - was[members]
        for outcome in (steps != 0, steps[steps != 0]):
            counts = np.unique(outcome, return_counts=True)[1]
            bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8


@pytest.mark.parametrize("late", [False, True])
def test_a_step_is_within_three_percent_of_the_limit(late: bool) -> None:
    """The whole file, even at 40 kB, where tables and header weigh more."""
    old, new = training_step(late)
    assert diff(old, new).nbytes <= 1.03 * conditional_entropy(old, new)


def test_an_anchor_is_at_most_70_percent() -> None:
    old, _ = training_step(late=True, shape=(1024, 1024))
    assert anchor(old).nbytes <= 0.70 * old["w"].nbytes


def test_a_dense_change_is_never_larger_than_all_weights() -> None:
    old, _ = training_step(late=True, shape=(1024, 1024))
    for spread in (1e-5, 1e-3, 1e-1):
        noise = np.random.default_rng(1).standard_normal(old["w"].shape, np.float32) * np.float32(spread)
        new = {"w": (old["w"].astype(np.float32) + noise).astype(ml_dtypes.bfloat16)}
        delta = diff(old, new)
        assert delta.nbytes <= anchor(new).nbytes + 64  # the digest of the base
        assert delta.nbytes < new["w"].nbytes


@pytest.mark.parametrize("name", ["BF16", "F32", "U8", "F64"])
def test_incompressible_weights_grow_by_at_most_one_percent(name: str) -> None:
    dtype = DTYPES[name]
    old, new = ({"w": (name, (256, 256), base(dtype, 65_536, "bits", seed))} for seed in (1, 2))
    raw = 65_536 * dtype.unit
    assert diff(old, new).nbytes <= 1.01 * raw
    assert anchor(new).nbytes <= 1.01 * raw


def test_one_weight_costs_less_than_400_bytes() -> None:
    old, _ = training_step(late=True, shape=(1024, 1024))
    new = {"w": old["w"].copy()}
    new["w"].view(np.uint16)[500, 500] ^= 1
    assert diff(old, new).nbytes < 400


def test_unchanged_rows_cost_nothing() -> None:
    """An embedding of which one row in a hundred was seen."""
    old, _ = training_step(late=True, shape=(20_000, 256))
    old["w"].view(np.uint16)[:] &= 0x7FFF  # up by one is then away from zero for all
    new = {"w": old["w"].copy()}
    bits = new["w"].view(np.uint16)
    bits[::100] = np.where(np.arange(256) % 2, bits[::100] + 1, bits[::100])
    positions = 200 * (math.log2(100) + 1.5) + 200 * 256  # which rows; then one bit a weight, at most
    assert diff(old, new).nbytes < 500 + positions / 8
