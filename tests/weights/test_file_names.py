"""File names in a checkpoint."""

from __future__ import annotations

import pytest

from weightwire.weights.file_names import is_side_file_name, is_weights_file


@pytest.mark.parametrize("name", ["config.json", "a/b.txt", "model.safetensors", "with space", "ü"])
def test_plain_relative_names_may_be_side_files(name: str) -> None:
    assert is_side_file_name(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", ".git/x", "a\\b", "a\0b", "a\nb"]
)
def test_hidden_names_and_names_outside_are_rejected(name: str) -> None:
    assert not is_side_file_name(name)


def test_weights_and_their_index_are_recognized() -> None:
    assert is_weights_file("model.safetensors")
    assert is_weights_file("model.safetensors.index.json")
    assert not any(map(is_weights_file, ("config.json", "safetensors", "model.safetensors.txt")))
