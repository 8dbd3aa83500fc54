"""Checkpoints on disk: which files are read, that none is copied, and what the refusals say."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.checkpoints import Arrays, numbers
from weightwire.errors import CheckpointError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.dtypes import DTYPES

F32, BF16, U8 = DTYPES["F32"], DTYPES["BF16"], DTYPES["U8"]


def assert_refused(path: Path, message: str, hint: str = "") -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(path)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


# Reading a file


def test_a_file_is_mapped_and_not_copied(single: Path) -> None:
    weights = Checkpoint(single)

    assert dict(weights.items()).keys() == {"a", "b"}
    assert (weights["a"].dtype, weights["a"].shape) == (F32, (2, 3))
    assert weights["a"].bits.tobytes() == numbers(2, 3).tobytes()
    assert not weights["a"].bits.flags.writeable
    assert np.shares_memory(weights["a"].bits, weights["a"].bits)
    assert weights.metadata == {"format": "pt"}
    assert [file.path for file in weights.files] == [single]
    assert (weights.index, weights.side_files) == (None, ())
    assert "c" not in weights


def test_a_file_whose_data_is_not_aligned(tmp_path: Path) -> None:
    head = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = tmp_path / "old.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + numbers(2).tobytes())

    assert Checkpoint(path)["x"].bits.tobytes() == numbers(2).tobytes()


# Reading a directory


def test_shards_and_side_files(sharded: Path) -> None:
    weights = Checkpoint(sharded)

    assert {name: tensor.shape for name, tensor in weights.items()} == {
        "a": (2, 3),
        "b": (4,),
        "c": (3, 0),
        "d": (2, 2),
    }
    assert len(weights) == 4
    assert [file.path.name for file in weights.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert weights.index == sharded / "model.safetensors.index.json"
    assert weights.side_files == (Path("config.json"), Path("tokenizer/vocab.txt"))
    assert weights["b"].bits.tolist() == [0, 0x3F80, 0x4000, 0x4040]


def test_any_safetensors_files_will_do_where_there_is_no_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert Checkpoint(sharded).keys() == {"a", "b", "c", "d"}


def test_one_file_of_another_name(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"x": numbers(1)}, tmp_path / "weights.safetensors")
    assert list(Checkpoint(tmp_path)) == ["x"]


def test_files_the_index_does_not_list_are_no_part_of_it(sharded: Path) -> None:
    safetensors.numpy.save_file({"other": numbers(1)}, sharded / "consolidated.safetensors")
    (sharded / ".cache").mkdir()
    (sharded / ".cache" / "lock").touch()
    (sharded / ".gitattributes").touch()

    weights = Checkpoint(sharded)

    assert "other" not in weights
    assert weights.side_files == (Path("config.json"), Path("tokenizer/vocab.txt"))


def test_model_safetensors_goes_before_an_index_as_in_transformers(sharded: Path) -> None:
    safetensors.numpy.save_file({"x": numbers(1)}, sharded / "model.safetensors")
    weights = Checkpoint(sharded)
    assert (list(weights), weights.index) == (["x"], None)


def test_a_hub_cache_of_symbolic_links(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sharded.iterdir()):
        if path.is_file():
            blob = tmp_path / f"blob{number}"
            path.rename(blob)
            (snapshot / path.name).symlink_to(blob)

    weights = Checkpoint(snapshot)

    assert weights.keys() == {"a", "b", "c", "d"}
    assert weights.files[0].path == snapshot / "model-00001-of-00002.safetensors"


# What cannot be read


def test_nothing_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "no such file or directory")


def test_neither_file_nor_directory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "no such file or directory")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert_refused(tmp_path, r"model\.safetensors: is empty")


def test_a_file_cut_short(single: Path) -> None:
    single.write_bytes(single.read_bytes()[:-1])
    assert_refused(single, "take 40 bytes, but it holds 39", "copy, download or write it again")


def test_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and so on")
    assert_refused(tmp_path, "holds no safetensors file", "convert its pickles")
    assert_refused(tmp_path / "pytorch_model.bin", "is no safetensors file", "convert its pickles")


def test_a_directory_without_weights(tmp_path: Path) -> None:
    assert_refused(tmp_path, "holds no safetensors file", "the directory that holds model.safetensors")


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert_refused(sharded, "00002-of-00002.safetensors: no such file", "download the missing shards")


def test_a_shard_without_the_tensor_the_index_has_there(sharded: Path) -> None:
    safetensors.numpy.save_file({"a": numbers(2, 3)}, sharded / "model-00001-of-00002.safetensors")
    assert_refused(sharded, "tensor 'b' is not in model-00001", "download or save both again")


def test_an_index_that_has_a_tensor_in_the_wrong_shard(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"a": "model-00001', '"a": "model-00002'))
    assert_refused(sharded, "tensor 'a' is not in model-00002")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    arrays: Arrays = {"c": numbers(3, 0), "d": numbers(2, 2), "a": numbers(1)}
    safetensors.numpy.save_file(arrays, sharded / "model-00002-of-00002.safetensors")
    assert_refused(sharded, "tensor 'a' is also in model-00001-of-00002", "pass one of them")


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/model.safetensors"}}',
        '{"weight_map": {"a": ""}}',
    ],
)
def test_a_broken_index(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert_refused(sharded, r"model\.safetensors\.index\.json: ")


def test_a_file_we_may_not_read(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(single))

    monkeypatch.setattr(Path, "open", denied)
    assert_refused(single, r"model\.safetensors: cannot be read \(Permission denied\)")
