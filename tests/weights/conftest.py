"""A sharded checkpoint directory and a single file, for the tests of reading and of writing them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import pytest
import safetensors.numpy

from support.checkpoints import Arrays, numbers, save_sharded


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shards: dict[str, Arrays] = {
        "model-00001-of-00002.safetensors": {"a": numbers(2, 3), "b": numbers(4, dtype=ml_dtypes.bfloat16)},
        "model-00002-of-00002.safetensors": {"c": numbers(3, 0), "d": numbers(2, 2)},
    }
    directory = save_sharded(tmp_path / "base", shards, total_size=48)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "vocab.txt").write_text("hello")
    return directory


@pytest.fixture
def single(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": numbers(2, 3), "b": numbers(4)}, path, metadata={"format": "pt"})
    return path
