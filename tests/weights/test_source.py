"""Reading weights: accepted sources, views without copies, and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from weightwire.errors import CheckpointError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.source import _read_plain_array, _read_plain_arrays, _read_tensor, read_weights
from weightwire.weights.tensor import Tensor, address_of, places_of


def one(value: Any) -> Tensor:
    """Reads one tensor named x."""
    return read_weights({"x": value})["x"]


def shaped(dtype: str, *shape: int) -> Tensor:
    nbytes = DTYPES[dtype].nbytes(shape)
    assert nbytes is not None
    return one((dtype, shape, bytes(nbytes)))


# NumPy arrays


def test_an_array_becomes_flat_bits_without_a_copy() -> None:
    array = np.array([[1.0, -0.0, np.nan], [np.inf, 5e-324, 2.0]])

    tensor = one(array)

    assert (tensor.dtype, tensor.shape) == (DTYPES["F64"], (2, 3))
    assert tensor.bits.dtype == np.dtype("<u8")
    assert tensor.bits.tobytes() == array.tobytes()
    tensor.bits[0] = 0
    assert array[0, 0] == 0


@pytest.mark.parametrize(
    ("array_dtype", "dtype"),
    [
        (np.bool_, "BOOL"),
        (np.uint8, "U8"),
        (np.int8, "I8"),
        (np.uint16, "U16"),
        (np.int16, "I16"),
        (np.uint32, "U32"),
        (np.int32, "I32"),
        (np.uint64, "U64"),
        (np.int64, "I64"),
        (np.float64, "F64"),
        (np.float32, "F32"),
        (np.float16, "F16"),
        (np.complex64, "C64"),
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
        (ml_dtypes.float8_e5m2, "F8_E5M2"),
        (ml_dtypes.float8_e4m3fnuz, "F8_E4M3FNUZ"),
        (ml_dtypes.float8_e5m2fnuz, "F8_E5M2FNUZ"),
        (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
    ],
)
def test_every_array_dtype_is_read_without_a_copy(array_dtype: Any, dtype: str) -> None:
    array = np.ones((2, 3), array_dtype)

    tensor = one(array)

    assert tensor.dtype.name == dtype
    assert tensor.bits.tobytes() == array.tobytes()
    assert np.shares_memory(tensor.bits, array)


def test_scalars_and_empty_arrays_are_read() -> None:
    assert one(np.array(1.5, np.float32)).bits.tolist() == [0x3FC00000]
    empty = one(np.empty((3, 0, 2), np.float16))
    assert (empty.shape, empty.count, empty.nbytes) == ((3, 0, 2), 0, 0)


def test_a_read_only_array_stays_read_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not one(array).bits.flags.writeable


def test_two_names_of_one_tensor_are_both_listed() -> None:
    tied = np.zeros((2, 2), np.float32)
    weights = read_weights({"embed": tied, "head": tied})
    assert list(weights) == ["embed", "head"]
    assert np.shares_memory(weights["embed"].bits, weights["head"].bits)


# Raw buffers, and weights that were read before


def test_a_buffer_with_a_dtype_and_shape_is_read_without_a_copy() -> None:
    memory = bytearray(range(8))

    tensor = one(("BF16", [2, 2], memory))

    assert tensor.shape == (2, 2)
    assert tensor.bits.tolist() == [0x0100, 0x0302, 0x0504, 0x0706]
    tensor.bits[0] = 0xFFFF
    assert memory[:2] == b"\xff\xff"


def test_a_buffer_need_not_be_aligned() -> None:
    assert one(("F32", [2], memoryview(bytes(range(9)))[1:])).bits.tolist() == [0x04030201, 0x08070605]


def test_a_packed_dtype_is_bytes() -> None:
    assert one(("F4", (2, 3), b"abc")).bits.tolist() == [*b"abc"]


def test_weights_can_be_read_again() -> None:
    weights = read_weights({"x": np.arange(3)})
    again = read_weights(weights)
    assert np.shares_memory(again["x"].bits, weights["x"].bits)


# Parts


def test_a_range_of_units_can_be_copied() -> None:
    array = np.arange(10, dtype=np.int16)
    out = np.zeros(3, np.uint16)
    one(array).copy_to(2, 5, out)
    assert out.tolist() == [2, 3, 4]


def test_tensors_have_the_same_place_only_if_they_are_the_same_memory() -> None:
    array = np.arange(10, dtype=np.int16)
    assert one(array).place == one(array).place == array.ctypes.data
    assert one(array).place != one(array.copy()).place
    assert one(array[:0]).place is None


# Units and rows


@pytest.mark.parametrize(
    ("tensor", "count"),
    [
        (shaped("F32"), 1),
        (shaped("F32", 5), 5),
        (shaped("F32", 2, 3, 4), 24),
        (shaped("F32", 0, 3), 0),
        (shaped("F4", 2, 3), 3),
        (shaped("F6_E2M3", 2, 4), 6),
    ],
)
def test_count_is_the_number_of_units(tensor: Tensor, count: int) -> None:
    assert tensor.count == count


def test_a_shard_holds_rows_of_a_whole() -> None:
    whole = one(np.arange(12, dtype=np.int32).reshape(4, 3))
    shard = one(Tensor(whole.dtype, whole.shape, whole.bits[3:9], rows=(1, 3)))
    assert (shard.shape, shard.rows, shard.bits.tolist()) == ((4, 3), (1, 3), [*range(3, 9)])


@pytest.mark.parametrize("rows", [(0, 3), (3, 5), (2, 1), (-1, 1)])
def test_a_shard_with_wrong_rows_is_rejected(rows: tuple[int, int]) -> None:
    whole = one(np.arange(12, dtype=np.int32).reshape(4, 3))
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        one(Tensor(whole.dtype, whole.shape, whole.bits[3:9], rows=rows))


# torch tensors


def test_torch_tensors_share_their_memory() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))

    tensor = one(parameter)

    assert (tensor.dtype.name, tensor.shape) == ("BF16", (2, 3))
    assert tensor.bits.tolist() == [0x3F80] * 6
    tensor.bits[0] = 0x4000
    assert parameter[0, 0] == 2


@pytest.mark.parametrize(
    ("torch_dtype", "dtype"),
    [
        ("bool", "BOOL"),
        ("uint8", "U8"),
        ("int8", "I8"),
        ("uint16", "U16"),
        ("int16", "I16"),
        ("uint32", "U32"),
        ("int32", "I32"),
        ("uint64", "U64"),
        ("int64", "I64"),
        ("float64", "F64"),
        ("float32", "F32"),
        ("float16", "F16"),
        ("bfloat16", "BF16"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("complex64", "C64"),
    ],
)
def test_every_torch_dtype_is_read_without_a_copy(torch_dtype: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    raw = torch.arange(32, dtype=torch.uint8)

    tensor = one(raw.view(getattr(torch, torch_dtype)))

    assert tensor.dtype.name == dtype
    assert tensor.bits.tobytes() == bytes(range(32))
    assert tensor.bits.ctypes.data == raw.data_ptr()


def test_torch_counts_the_bytes_of_packed_float4_and_safetensors_its_elements() -> None:
    torch = pytest.importorskip("torch")
    tensor = one(torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert (tensor.dtype.name, tensor.shape, tensor.count) == ("F4", (3, 8), 12)


def test_torch_scalars_empty_tensors_and_modules_are_read() -> None:
    torch = pytest.importorskip("torch")
    assert one(torch.tensor(1.0)).shape == ()
    assert one(torch.empty(0, 3)).count == 0
    weights = read_weights(torch.nn.Linear(2, 3))
    assert {name: tensor.shape for name, tensor in weights.items()} == {"weight": (3, 2), "bias": (3,)}


def test_torch_tensors_without_contiguous_bits_in_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for value, message in [
        (torch.ones(2, 3).T, "not contiguous"),
        (torch.ones(2, 3)[:, :2], "not contiguous"),
        (torch.ones(3, dtype=torch.complex64).conj(), "not contiguous"),
        (torch.ones(3, device="meta"), "on meta"),
        (torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(3, dtype=torch.complex128), "unknown dtype complex128"),
    ]:
        with pytest.raises(CheckpointError, match=f"tensor 'x': .*{message}") as caught:
            one(value)
        assert caught.value.hint


def test_nothing_here_imports_torch_or_ml_dtypes() -> None:
    code = (
        "import sys, numpy, weightwire.weights as w; w.read_weights({'x': numpy.zeros(3)});"
        "sys.exit(bool({'torch', 'ml_dtypes', 'safetensors'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Errors


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 3)).T, "is not contiguous"),
        (np.zeros(6)[::2], "is not contiguous"),
        (np.zeros(3, ">f4"), "is big-endian"),
        (np.zeros(3, np.complex128), "unknown dtype complex128"),
        (np.zeros(3, ml_dtypes.float4_e2m1fn), "unknown dtype float4_e2m1fn"),
        (np.array(["text"]), "unknown dtype"),
        (np.array([None]), "unknown dtype object"),
        ([1, 2, 3], "has type list"),
        (None, "has type NoneType"),
        (("F32", (2,)), "has type tuple"),
        (("float32", (2,), bytes(8)), "unknown dtype 'float32'"),
        ((["F32"], (2,), bytes(8)), "unknown dtype"),
        (("F32", (2,), bytes(7)), "does not fit a buffer of 7 bytes"),
        (("F32", (2,), bytes(9)), "does not fit a buffer of 9 bytes"),
        (("F32", (2**62, 4), bytes(0)), "does not fit a buffer of 0 bytes"),
        (("F4", (3,), bytes(1)), "does not fit a buffer of 1 bytes"),
        (("F32", (-1, -2), bytes(8)), "does not fit a buffer of 8 bytes"),
        (("F32", 2, bytes(8)), "is not a shape"),
        (("F32", (2.0,), bytes(8)), "is not a shape"),
        (("F32", (2,), "text"), "no contiguous buffer"),
        (("F32", (2,), memoryview(bytes(16))[::2]), "no contiguous buffer"),
        (Tensor(DTYPES["F32"], (3,), np.zeros(2, np.uint32)), "does not fit a buffer of 8 bytes"),
    ],
)
def test_unsupported_values_are_rejected(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^tensor 'x': .*{message}") as caught:
        one(value)
    assert caught.value.hint


@pytest.mark.parametrize("name", [1, "__metadata__", "\ud800"])
def test_invalid_names_are_rejected(name: Any) -> None:
    with pytest.raises(CheckpointError, match="is not a valid tensor name"):
        read_weights({name: np.zeros(1)})


@pytest.mark.parametrize("source", [1, None, [("x", np.zeros(1))]])
def test_other_objects_are_rejected(source: Any) -> None:
    with pytest.raises(CheckpointError, match="weights cannot be read from"):
        read_weights(source)


# Files


def test_a_path_is_read_as_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": np.arange(3, dtype=np.int16)}, path)

    for source in (path, str(path), tmp_path, Checkpoint(path)):
        weights = read_weights(source)
        assert isinstance(weights, Checkpoint)
        assert weights["x"].bits.tolist() == [0, 1, 2]


# The short way


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.float64),
        np.zeros((2, 0), np.float32),
        np.array(3.0, np.float32),
        np.arange(12, dtype=np.int8)[1:],
        np.frombuffer(b"0123456789", np.uint16),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_the_short_way_reads_the_same(array: np.ndarray[Any, Any]) -> None:
    raw = ("U8", (array.nbytes,), array)
    for value in (array, raw):
        quick = _read_plain_array(value)
        thorough = _read_tensor("x", value)
        assert quick is None or (quick.dtype, quick.shape, quick.rows) == (thorough.dtype, thorough.shape, None)
        assert quick is None or quick.bits.dtype == thorough.bits.dtype
        assert quick is None or np.array_equal(quick.bits, thorough.bits)
        assert quick is None or np.shares_memory(quick.bits, array)
        assert (quick is None) == (not array.size or (value is array and not array.shape))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(6, dtype=">i4"),
        np.array(["text"]),
        ("F99", (6,), np.zeros(6, np.uint8)),
        ("U8", (7,), np.zeros(6, np.uint8)),
        ("U8", (-6,), np.zeros(6, np.uint8)),
        ("U8", (6.0,), np.zeros(6, np.uint8)),
        ("U8", (True, 6), np.zeros(6, np.uint8)),
        ("U8", ([6],), np.zeros(6, np.uint8)),
        ("F4", (3,), np.zeros(1, np.uint8)),
        (8, (6,), np.zeros(6, np.uint8)),
        ("U8", (6,), np.zeros(12, np.uint8)[::2]),
        ("U8", [6], np.zeros(6, np.uint8)),
        ("U8", (6,), bytes(6)),
        np.zeros(3).view(np.ma.MaskedArray),
    ],
    ids=repr,
)
def test_the_short_way_leaves_everything_else_to_the_thorough_one(value: object) -> None:
    assert _read_plain_array(value) is None
    plain = np.zeros(3) if isinstance(value, np.ndarray) else ("U8", (3,), np.zeros(3, np.uint8))
    for shape in ((6,), (1, 6)):  # equal shapes that were read before make no difference
        assert _read_plain_array(("U8", shape, np.zeros(6, np.uint8)))
    assert _read_plain_array(value) is None
    assert _read_plain_arrays(["x", "y"], [plain, value]) is None


@pytest.mark.parametrize(
    "values",
    [
        [np.arange(6, dtype=np.int16).reshape(2, 3), np.arange(4.0), np.zeros((1, 2), bool)],
        [("BF16", (2, 3), np.arange(6, dtype=np.uint16).reshape(2, 3)), ("F4", (4,), np.zeros(2, np.uint8))],
    ],
    ids=["arrays", "buffers"],
)
def test_many_arrays_are_read_as_one_by_one(values: list[Any]) -> None:
    names = [str(k) for k in range(len(values))]
    read = _read_plain_arrays(names, values)
    assert read is not None
    assert [*read] == names
    for name, value in zip(names, values, strict=True):
        made, wanted = read[name], _read_tensor(name, value)
        assert (made.dtype, made.shape, made.rows) == (wanted.dtype, wanted.shape, None)
        assert made.place == wanted.place
        assert made.bits.dtype == wanted.bits.dtype
        assert np.array_equal(made.bits, wanted.bits)


@pytest.mark.parametrize("name", [7, "\ud800", "__metadata__"])
def test_many_arrays_with_a_name_that_cannot_be_stored_are_refused(name: Any) -> None:
    with pytest.raises(CheckpointError, match="not a valid tensor name"):
        read_weights({"x": np.zeros(3), name: np.zeros(3)})


def test_places_are_known_however_many_are_asked_for() -> None:
    writable, fixed, empty = np.arange(5, dtype=np.uint16), np.frombuffer(b"0123456789", np.uint16), np.zeros(0)
    for arrays in ([writable, writable[1:]], [writable, fixed], [writable, empty], [writable, writable]):
        tensors = [one(array) for array in arrays]
        assert places_of(tensors) == [tensor.place for tensor in tensors]


def test_an_address_is_known_whether_an_array_is_writable_or_not() -> None:
    writable, fixed = np.arange(5, dtype=np.uint16), np.frombuffer(b"0123456789", np.uint16)
    for array in (writable, fixed, writable[2:], fixed[2:]):
        assert address_of(array) == array.ctypes.data
