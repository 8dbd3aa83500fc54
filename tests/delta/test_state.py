"""The state digest: the same for equal weights, different for any difference."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

import weightwire
from support.samples import base, whole_digest, words
from weightwire import Tensor
from weightwire.codec import numpy_kernel
from weightwire.delta.state import State, TensorState, add_digests, digest, subtract_digests
from weightwire.weights.dtypes import DTYPES

BF16, F32 = DTYPES["BF16"], DTYPES["F32"]


def weights() -> dict[str, npt.NDArray[Any]]:
    return {
        "embed": words(1, 100 * 64 // 4).view(np.uint16).reshape(100, 64),
        "bias": words(2, 5).view(np.float32)[:9].copy(),
        "norm": words(3, 3).view(np.uint8)[:21].reshape(7, 3).copy(),
        "scale": np.array(1.5, np.float32),
        "none": np.zeros((4, 0), np.float16),
    }


def one(array: npt.NDArray[Any]) -> str:
    return digest({"x": array}).hex


# Equal weights


def test_digests_are_pinned(implementation: str) -> None:
    """These must never change: buckets and replicas compare them across releases."""
    assert digest({}).hex == "940bcfb12b0d1ccb8d48e00d7201581f6a641a28acf857f50e18ca1290ef1708"
    assert digest(weights()).hex == "ce1360c3cea1bf3d2dbac0e5a819eb026f6310461d51b677a42620cd2303efb1"


def test_the_state_is_a_hash_of_names_dtypes_shapes_and_lanes() -> None:
    array = np.array([[1, 2, 3, 4]] * 2, np.uint16)
    a, b = whole_digest(numpy_kernel, array, 8, 0)
    expected = hashlib.sha256(b"weightwire state 1\n")
    expected.update(b"\x02" + "ü".encode() + bytes([DTYPES["U16"].code, 2, 2, 4]))
    expected.update(a.to_bytes(8, "little") + b.to_bytes(8, "little"))
    assert digest({"ü": array}).hex == expected.hexdigest()


def test_names_are_in_the_order_of_their_bytes() -> None:
    arrays = {name: np.zeros(1, np.uint8) for name in ("b", "ä", "a", "\U0001f600", "\uffff", "a.b", "")}
    listed = list(digest(arrays).tensors)
    assert listed == sorted(arrays, key=str.encode)
    assert listed[-2:] == ["\uffff", "\U0001f600"]


def test_the_order_of_the_mapping_does_not_matter() -> None:
    forwards = weights()
    assert digest(forwards) == digest(dict(reversed(forwards.items())))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_state_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    large = {"x": np.arange(9_000_000, dtype=np.uint16).reshape(9000, 1000)}
    assert digest(large, threads=threads).tensors["x"].digest == whole_digest(
        numpy_kernel, large["x"].reshape(-1), 8, 0
    )


def test_files_and_memory_have_the_same_state(tmp_path: Path) -> None:
    safetensors.numpy.save_file(weights(), tmp_path / "w.safetensors")
    assert digest(tmp_path / "w.safetensors") == digest(weights())


@pytest.mark.parametrize("cuts", [[0, 100], [0, 1, 100], [0, 30, 31, 77, 100]])
def test_shards_add_up_to_the_whole(cuts: list[int]) -> None:
    """Each rank digests only its rows."""
    for array in (weights()["embed"], words(4, 75).view(np.uint16).reshape(100, 3)):  # words of 8 bytes, of 2 bytes
        total = (0, 0)
        for first, last in itertools.pairwise(cuts):
            bits = array[first:last].reshape(-1)
            shard = digest({"x": Tensor(DTYPES["U16"], array.shape, bits, (first, last))})
            total = add_digests(total, shard.tensors["x"].digest)
        assert total == digest({"x": array}).tensors["x"].digest


def test_a_view_and_its_copy_have_the_same_state() -> None:
    buffer = bytearray(1) + weights()["embed"].tobytes()
    odd = ("U16", (100, 64), memoryview(buffer)[1:])
    assert digest({"x": odd}).hex == one(weights()["embed"])


def test_progress_counts_every_byte() -> None:
    heard: list[int] = []
    digest(weights(), progress=heard.append)
    assert sum(heard) == sum(array.nbytes for array in weights().values())


# Differences


def test_swapping_two_weights_changes_the_state() -> None:
    for width in (64, 63):  # in one word, and in two
        array = words(5, 1600).view(np.uint16)[: 100 * width].reshape(100, width).copy()
        swapped = array.copy()
        swapped[7, [2, 3]] = swapped[7, [3, 2]]
        assert one(swapped) != one(array)


def test_swapping_two_rows_changes_the_state() -> None:
    array = weights()["embed"]
    assert one(array[[1, 0, *range(2, 100)]]) != one(array)


def test_any_flipped_bit_changes_the_state() -> None:
    array = base(F32, 6)
    states = {one(array)}
    for bit in range(6 * 32):
        flipped = array.copy()
        flipped[bit // 32] ^= np.uint32(1 << bit % 32)
        states.add(one(flipped))
    assert len(states) == 1 + 6 * 32


def test_zeros_and_nans_are_distinguished() -> None:
    patterns = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80], np.uint16)
    assert len({digest({"x": ("BF16", (), pattern.tobytes())}).hex for pattern in patterns}) == 6


def test_name_dtype_and_shape_change_the_state() -> None:
    raw = bytes(range(48))
    states = {
        digest({name: (dtype, shape, raw)}).hex
        for name, dtype, shape in [
            ("x", "F32", (12,)),
            ("y", "F32", (12,)),
            ("x", "I32", (12,)),
            ("x", "F32", (3, 4)),
            ("x", "F32", (4, 3)),
            ("x", "F32", (1, 12)),
            ("x", "BF16", (24,)),
        ]
    }
    assert len(states) == 7


def test_names_and_tensors_are_delimited() -> None:
    empty = np.zeros(0, np.uint8)
    assert digest({"ab": empty, "c": empty}) != digest({"a": empty, "bc": empty})
    assert digest({"a": empty}).hex != digest({}).hex
    assert digest({"a": empty}) != digest({"a": empty, "b": empty})


# As a value


def test_states_are_equal_if_their_tensors_are() -> None:
    assert digest(weights()) == digest(weights())
    assert hash(digest(weights())) == hash(digest(weights()))
    assert digest(weights()) != digest({})
    assert digest({}) != "state"
    assert repr(digest({})) == "State(0 tensors, 940bcfb12b0d)"


def test_replace_adds_changes_and_removes_tensors() -> None:
    before = digest(weights())
    scale = TensorState(F32, (), (1, 2))
    after = before.replace({"scale": scale, "added": scale}, removed=["bias", "never there"])
    assert after.tensors["scale"] == after.tensors["added"] == scale
    assert set(after.tensors) == {"added", "embed", "none", "norm", "scale"}
    assert before == digest(weights())


def test_digest_sums_wrap_around_at_64_bits() -> None:
    assert add_digests((2**64 - 1, 5), (2, 2**64 - 5)) == (1, 0)
    assert subtract_digests((1, 0), (2, 2**64 - 5)) == (2**64 - 1, 5)


def test_a_delta_advances_a_state() -> None:
    """From the entries alone, and equal to a full digest of the result."""
    old, new = weights(), weights()
    new["embed"][3, 4] ^= 1
    new["bias"] = new["bias"][::-1].copy()
    new["added"] = np.ones(3, np.int64)
    del new["norm"]
    assert weightwire.diff(old, new).advance(digest(old)) == digest(new)


def test_an_anchor_gives_a_state_without_a_base() -> None:
    assert weightwire.anchor(weights()).advance(State({})) == digest(weights())


def test_the_digests_of_a_state_cannot_be_changed() -> None:
    state = digest(weights())
    for one in (state, State(dict(state.tensors)), state.with_digests([], state.digests[:0])):
        with pytest.raises(ValueError, match="read-only"):
            one.digests[0] = 1


# Many tensors at once


def test_digests_are_replaced_by_name_and_not_by_place() -> None:
    state = digest({name: np.full(8, k, np.uint8) for k, name in enumerate("dbac")})
    rows = np.array([[1, 2], [3, 4]], np.uint64)
    after = state.with_digests(["d", "a"], rows)
    assert [after.tensors[name].digest for name in "da"] == [(1, 2), (3, 4)]
    assert [after.tensors[name] for name in "bc"] == [state.tensors[name] for name in "bc"]
    assert after.digests_of(["a", "d"]).tolist() == [[3, 4], [1, 2]]
    assert after == State(dict(after.tensors))
    assert after.hex == State(dict(after.tensors)).hex != state.hex


def test_after_adds_removes_and_reshapes_as_replace_does() -> None:
    state = digest({name: np.zeros(8, np.uint8) for name in "abc"})
    u8, rows = DTYPES["U8"], np.array([[5, 6], [7, 2**64 - 1]], np.uint64)
    wanted = {"a": TensorState(u8, (2, 4), (5, 6)), "d": TensorState(u8, (2, 4), (7, 2**64 - 1))}
    after = state.after([(("a", "d"), (u8, (2, 4)), rows)], ["b"])
    assert after == state.replace(wanted, ["b"])
    assert after.hex == state.replace(wanted, ["b"]).hex
    assert list(after.tensors) == ["a", "c", "d"]
    assert state.after([]) == state


def test_another_dtype_or_shape_is_another_state() -> None:
    u8, i8, rows = DTYPES["U8"], DTYPES["I8"], np.array([[5, 6]], np.uint64)
    state = State({"a": TensorState(u8, (8,), (5, 6))})
    for dtype, shape in ((i8, (8,)), (u8, (2, 4))):
        wanted = TensorState(dtype, shape, (5, 6))
        after = state.after([(["a"], (dtype, shape), rows)])
        assert after.tensors["a"] == wanted
        assert after != state
        assert after.hex != state.hex
        assert after == state.replace({"a": wanted})
