"""Checkpoints on disk: which files are read, and errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.checkpoints import Arrays, numbers
from support.special_files import fifo_at, in_time
from weightwire.errors import CheckpointError
from weightwire.weights.checkpoint import Checkpoint, _open_shard
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


def test_a_file_with_unaligned_data_is_read(tmp_path: Path) -> None:
    head = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = tmp_path / "old.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + numbers(2).tobytes())

    assert Checkpoint(path)["x"].bits.tobytes() == numbers(2).tobytes()


# Reading a directory


def test_a_sharded_directory_has_all_tensors_and_side_files(sharded: Path) -> None:
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


def test_all_safetensors_files_are_read_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert Checkpoint(sharded).keys() == {"a", "b", "c", "d"}


def test_one_file_may_have_any_name(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"x": numbers(1)}, tmp_path / "weights.safetensors")
    assert list(Checkpoint(tmp_path)) == ["x"]


def test_files_that_the_index_does_not_list_are_ignored(sharded: Path) -> None:
    safetensors.numpy.save_file({"other": numbers(1)}, sharded / "consolidated.safetensors")
    (sharded / ".cache").mkdir()
    (sharded / ".cache" / "lock").touch()
    (sharded / ".gitattributes").touch()

    weights = Checkpoint(sharded)

    assert "other" not in weights
    assert weights.side_files == (Path("config.json"), Path("tokenizer/vocab.txt"))


def test_model_safetensors_has_priority_over_an_index(sharded: Path) -> None:
    safetensors.numpy.save_file({"x": numbers(1)}, sharded / "model.safetensors")
    weights = Checkpoint(sharded)
    assert (list(weights), weights.index) == (["x"], None)


def test_a_hub_cache_of_symbolic_links_is_read(sharded: Path, tmp_path: Path) -> None:
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


# Errors


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent", "no such file or directory")


def test_a_device_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "no such file or directory")


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert_refused(tmp_path, r"model\.safetensors: is empty")


def test_a_truncated_file_is_an_error(single: Path) -> None:
    single.write_bytes(single.read_bytes()[:-1])
    assert_refused(single, "take 40 bytes, but it has 39 bytes of data", "download or write it again")


def test_a_pickle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and so on")
    assert_refused(tmp_path, ": no safetensors file", "save_pretrained")
    assert_refused(tmp_path / "pytorch_model.bin", ": not a safetensors file", "save_pretrained")


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    assert_refused(tmp_path, ": no safetensors file", "the directory that holds model.safetensors")


def test_a_missing_shard_is_an_error(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert_refused(sharded, "00002-of-00002.safetensors: no such file", "download the missing shards")


def test_a_tensor_missing_in_its_shard_is_an_error(sharded: Path) -> None:
    safetensors.numpy.save_file({"a": numbers(2, 3)}, sharded / "model-00001-of-00002.safetensors")
    assert_refused(sharded, "tensor 'b' is not in model-00001", "download or save both again")


def test_a_tensor_in_another_shard_is_an_error(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"a": "model-00001', '"a": "model-00002'))
    assert_refused(sharded, "tensor 'a' is not in model-00002")


def test_a_tensor_in_two_shards_is_an_error(sharded: Path) -> None:
    arrays: Arrays = {"c": numbers(3, 0), "d": numbers(2, 2), "a": numbers(1)}
    safetensors.numpy.save_file(arrays, sharded / "model-00002-of-00002.safetensors")
    assert_refused(sharded, "tensor 'a' is also in model-00001-of-00002", "pass a single file")


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
def test_a_malformed_index_is_an_error(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert_refused(sharded, r"model\.safetensors\.index\.json: ")


def test_an_unreadable_file_is_an_error(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(single))

    monkeypatch.setattr(os, "open", denied)
    assert_refused(single, r"model\.safetensors: cannot be read \(Permission denied\)")


def test_a_checkpoint_with_a_fifo_in_place_of_weights_is_refused_at_once(single: Path) -> None:
    """Also if the FIFO takes the place after the directory was listed."""
    with fifo_at(single):
        found = in_time(lambda: _open_shard(single))
        assert isinstance(found, CheckpointError)
        assert "not a regular file" in found.message
        assert found.hint


def test_folders_nested_too_deeply_are_an_error(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.walk is recursive before Python 3.12."""

    def walk(*_: Any, **__: Any) -> None:
        raise RecursionError

    monkeypatch.setattr(os, "walk", walk)
    assert_refused(single.parent, "its folders are nested too deeply")
