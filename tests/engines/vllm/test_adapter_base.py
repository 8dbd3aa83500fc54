"""Adapters that were made for another model are recognized by their shapes."""

from __future__ import annotations

import numpy as np
import pytest

from weightwire.engines.vllm.adapter_base import base_mismatch
from weightwire.weights import read_weights

BASE = {"model.layers.0.q_proj.weight": (8, 4), "model.layers.1.q_proj.weight": (8, 4), "lm_head.weight": (10, 4)}


def found(**shapes: tuple[int, ...]) -> str:
    """`A0=(2, 4)` is factor A of layer 0."""
    names = {f"base_model.model.model.layers.{key[1:]}.q_proj.lora_{key[0]}.weight": one for key, one in shapes.items()}
    weights = [{name: np.zeros(one, np.float32) for name, one in some.items()} for some in (names, BASE)]
    return base_mismatch(*map(read_weights, weights))


@pytest.mark.parametrize("shapes", [{"A0": (2, 4), "B0": (8, 2)}, {"A1": (64, 4), "B1": (8, 64)}, {}])
def test_any_rank_fits(shapes: dict[str, tuple[int, ...]]) -> None:
    assert found(**shapes) == ""


@pytest.mark.parametrize("shapes", [{"A0": (2, 3)}, {"A0": (2, 5)}, {"B0": (7, 2)}, {"A0": (2, 4), "B1": (9, 2)}])
def test_other_sizes_are_named(shapes: dict[str, tuple[int, ...]]) -> None:
    assert "has shape" in found(**shapes)


def test_a_layer_that_the_base_does_not_have_is_named() -> None:
    assert "changes model.layers.2.q_proj.weight, which the base model does not have" in found(A2=(2, 4))


def test_layers_with_names_that_the_checkpoint_does_not_use_are_not_judged() -> None:
    weights = read_weights({"base_model.model.vision.q_proj.lora_A.weight": np.zeros((2, 3), np.float32)})
    assert base_mismatch(weights, read_weights({name: np.zeros(one, np.float32) for name, one in BASE.items()})) == ""
