"""The table of dtypes agrees with NumPy, ml_dtypes and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from weightwire.weights.dtypes import BY_ARRAY_NAME, BY_CODE, DTYPES, Dtype
from weightwire.weights.source import present, read_weights

BITS = bytes(range(48))  # a whole number of elements of every width
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def numpy_dtype(dtype: Dtype) -> Any:
    """The dtype of NumPy or ml_dtypes, or None."""
    name = dtype.array_name
    return np.sctypeDict.get(name, getattr(ml_dtypes, name, None)) if name else None


IN_NUMPY = [dtype for dtype in DTYPES.values() if numpy_dtype(dtype)]
IN_TORCH = [dtype for dtype in DTYPES.values() if dtype.array_name]


@EVERY_DTYPE
def test_name_code_and_array_name_find_the_dtype(dtype: Dtype) -> None:
    assert DTYPES[dtype.name] is dtype
    assert BY_CODE[dtype.code] is dtype
    assert not dtype.array_name or BY_ARRAY_NAME[dtype.array_name] is dtype


def test_no_two_dtypes_share_a_code_or_an_array_name() -> None:
    assert len(BY_CODE) == len(DTYPES)
    assert len(BY_ARRAY_NAME) == sum(bool(dtype.array_name) for dtype in DTYPES.values())


@EVERY_DTYPE
def test_a_float_is_a_sign_an_exponent_and_a_mantissa(dtype: Dtype) -> None:
    assert not dtype.is_float or 1 + dtype.exponent + dtype.mantissa == dtype.bits


def test_weights_are_cast_only_to_floats_that_training_uses() -> None:
    assert [dtype.array_name for dtype in DTYPES.values() if dtype.is_castable] == [
        "float64",
        "float32",
        "float16",
        "bfloat16",
    ]


def test_only_sub_byte_dtypes_are_missing_in_numpy_or_torch() -> None:
    assert {dtype.name for dtype in DTYPES.values()} - {dtype.name for dtype in IN_NUMPY} == {
        "F4",
        "F6_E2M3",
        "F6_E3M2",
    }
    assert {dtype.name for dtype in DTYPES.values()} - {dtype.name for dtype in IN_TORCH} == {"F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize("dtype", IN_NUMPY, ids=lambda dtype: dtype.name)
def test_bits_return_from_numpy_unchanged(dtype: Dtype) -> None:
    array = np.frombuffer(BITS, numpy_dtype(dtype))

    tensor = read_weights({"x": array})["x"]

    assert (tensor.dtype, tensor.shape) == (dtype, array.shape)
    again = present(tensor, like=array)
    assert (again.dtype, again.tobytes()) == (array.dtype, BITS)


@pytest.mark.parametrize("dtype", IN_TORCH, ids=lambda dtype: dtype.name)
def test_bits_return_from_torch_unchanged(dtype: Dtype) -> None:
    torch = pytest.importorskip("torch")
    torch_dtype = getattr(torch, dtype.array_name)
    value = torch.frombuffer(bytearray(BITS), dtype=torch.uint8).view(torch_dtype)

    tensor = read_weights({"x": value})["x"]

    assert (tensor.dtype, tensor.shape) == (dtype, (len(BITS) * 8 // dtype.bits,))
    again = present(tensor, like=value)
    assert again.dtype == torch_dtype
    assert bytes(again.view(torch.uint8).numpy()) == BITS
