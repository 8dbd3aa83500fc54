"""Schemas, and copies from one set of weights to another of the same schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightwire.errors import SchemaChanged
from weightwire.weights import Weights, read_weights
from weightwire.weights.schema import copy_weights
from weightwire.weights.tensor import nbytes_of


def filled(sizes: dict[str, int]) -> Weights:
    return read_weights({name: np.zeros(size) for name, size in sizes.items()})


class TestCopyWeights:
    def test_copy_weights_copies_every_bit(self) -> None:
        source: dict[str, Any] = {
            "a": np.arange(1000, dtype=np.uint16).reshape(10, 100),
            "b": np.array(-1.5, np.float32),
        }
        held: dict[str, Any] = {name: np.zeros_like(array) for name, array in source.items()}
        copy_weights(read_weights(source), read_weights(held))
        assert all(np.array_equal(held[name], source[name]) for name in source)

    @pytest.mark.parametrize(
        ("source", "targets", "message"),
        [
            ("a", "", "tensor 'a' is not in the run"),
            ("", "a", "tensor 'a' of the run is missing"),
            ("a", "b", "tensor 'b' of the run is missing; tensor 'a' is not in the run"),
            ("", "abcd", "4 tensors ('a', 'b', 'c', ...) of the run are missing"),
            ("abc", "a", "2 tensors ('b', 'c') are not in the run"),
        ],
    )
    def test_copy_weights_refuses_other_names(self, source: str, targets: str, message: str) -> None:
        with pytest.raises(SchemaChanged) as caught:
            copy_weights(filled(dict.fromkeys(source, 1)), filled(dict.fromkeys(targets, 1)))
        assert caught.value.message == message

    @pytest.mark.parametrize("other", [np.zeros(3, np.uint16), np.zeros(4, np.int16), np.zeros((4, 1), np.uint16)])
    def test_copy_weights_refuses_other_dtypes_and_shapes(self, other: Any) -> None:
        with pytest.raises(SchemaChanged, match=r"tensor 'a': is \w+ \[.*\], but U16 \[4\] in the run"):
            copy_weights(read_weights({"a": other}), read_weights({"a": np.zeros(4, np.uint16)}))

    def test_names_all_tensors_with_the_same_change_of_dtype(self) -> None:
        run = {name: np.zeros(4, np.uint16) for name in "abcdef"}
        weights: dict[str, Any] = {name: np.zeros(4, np.float16) for name in "abcd"}
        weights |= {"e": np.zeros(5, np.float16), "f": np.zeros(4, np.int8)}
        with pytest.raises(SchemaChanged) as caught:
            copy_weights(read_weights(weights), read_weights(run))
        assert caught.value.message == "4 tensors ('a', 'b', 'c', ...) are F16, but U16 in the run"


def test_nbytes_of_weights_is_the_sum_over_all_tensors() -> None:
    assert nbytes_of(read_weights({"a": np.zeros((3, 5), np.uint16), "b": np.zeros((), np.float32)})) == 34
