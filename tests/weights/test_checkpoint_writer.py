"""Checkpoints on disk: which files are read, and that writing one is all or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from weightwire.errors import CheckpointError, OutputError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.checkpoint_writer import CheckpointWriter, replacing
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.schema import Schema
from weightwire.weights.tensor import Weights

F32, BF16, U8 = DTYPES["F32"], DTYPES["BF16"], DTYPES["U8"]
Arrays = dict[str, npt.NDArray[Any]]


def numbers(*shape: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def save_sharded(directory: Path, shards: Mapping[str, Arrays], **metadata: Any) -> Path:
    """A directory as transformers saves it."""
    directory.mkdir(exist_ok=True)
    for name, arrays in shards.items():
        safetensors.numpy.save_file(arrays, directory / name, metadata={"format": "pt"})
    index = {
        "metadata": metadata,
        "weight_map": {name: shard for shard, arrays in shards.items() for name in arrays},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


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


def schema_of(weights: Weights) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def copy(base: Checkpoint, out: Path, schema: Schema | None = None) -> None:
    """Write what `base` holds, and zeros for what it does not."""
    with CheckpointWriter(out, schema=schema or schema_of(base), like=base) as writer:
        for name in schema or base:
            tensor = writer[name]
            if name in base and base[name].shape == tensor.shape:
                tensor.bits[:] = base[name].bits


def tree(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


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


# Writing: the same bits give the same files


def test_a_copy_of_a_directory_is_the_same_bytes(sharded: Path, tmp_path: Path) -> None:
    copy(Checkpoint(sharded), tmp_path / "out")

    assert tree(tmp_path / "out") == tree(sharded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_a_copy_of_a_file_is_the_same_bytes_even_if_no_two_writers_agree_on_them(tmp_path: Path) -> None:
    head = b'{ "x": {"shape": [2], "dtype": "F32", "data_offsets": [0, 8]} }'
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + numbers(2).tobytes())

    copy(Checkpoint(path), tmp_path / "out.safetensors")

    assert (tmp_path / "out.safetensors").read_bytes() == path.read_bytes()


def test_only_changed_bits_differ(sharded: Path, tmp_path: Path) -> None:
    base = Checkpoint(sharded)
    with CheckpointWriter(tmp_path / "out", schema=schema_of(base), like=base) as writer:
        for name, tensor in base.items():
            writer[name].bits[:] = tensor.bits
        writer["d"].bits[1] ^= 1

    before, after = tree(sharded), tree(tmp_path / "out")
    differ = {name for name in before if before[name] != after[name]}
    assert differ == {"model-00002-of-00002.safetensors"}


def test_a_link_in_the_base_becomes_a_file(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text("elsewhere")
    (sharded / "linked.json").symlink_to(tmp_path / "elsewhere.json")

    copy(Checkpoint(sharded), tmp_path / "out")

    assert not (tmp_path / "out" / "linked.json").is_symlink()
    assert (tmp_path / "out" / "linked.json").read_text() == "elsewhere"


# Writing: tensors come and go


def test_added_tensors_go_to_the_last_shard_and_removed_ones_leave(sharded: Path, tmp_path: Path) -> None:
    base = Checkpoint(sharded)
    schema = schema_of(base) | {"e": (BF16, (3,)), "odd": (U8, (3,)), "d": (F32, (2, 3))}
    del schema["a"]
    copy(base, tmp_path / "out", schema)

    out = Checkpoint(tmp_path / "out")
    assert schema_of(out) == schema
    first, last = (safetensors.numpy.load_file(file.path) for file in out.files)
    assert list(first) == ["b"]
    assert sorted(last) == ["c", "d", "e", "odd"]
    assert first["b"].tobytes() == base["b"].bits.tobytes()
    assert out.metadata == {"format": "pt"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 8 + 24 + 6 + 3},
        "weight_map": {name: out.files[name != "b"].path.name for name in schema},
    }


def test_a_shard_that_loses_all_its_tensors_goes(sharded: Path, tmp_path: Path) -> None:
    base = Checkpoint(sharded)
    copy(base, tmp_path / "out", {"d": (F32, (2, 2))})

    out = Checkpoint(tmp_path / "out")
    assert [file.path.name for file in out.files] == ["model-00002-of-00002.safetensors"]
    assert out["d"].bits.tobytes() == base["d"].bits.tobytes()


def test_what_is_laid_out_afresh_is_laid_out_as_stock_safetensors_does(single: Path, tmp_path: Path) -> None:
    base = Checkpoint(single)
    copy(base, tmp_path / "out.safetensors", schema_of(base) | {"aa": (F32, (1,)), "n": (U8, (3,))})

    arrays: Arrays = {"a": numbers(2, 3), "b": numbers(4), "aa": numbers(1), "n": np.zeros(3, np.uint8)}
    expected = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    assert (tmp_path / "out.safetensors").read_bytes() == expected


def test_no_tensors_at_all(single: Path, tmp_path: Path) -> None:
    base = Checkpoint(single)
    with CheckpointWriter(tmp_path / "out.safetensors", schema={}, like=base):
        pass
    assert safetensors.numpy.load_file(tmp_path / "out.safetensors") == {}


@pytest.mark.parametrize(("out", "file"), [("new.safetensors", "new.safetensors"), ("new", "new/model.safetensors")])
def test_without_a_model_the_name_decides(tmp_path: Path, out: str, file: str) -> None:
    with CheckpointWriter(tmp_path / out, schema={"x": (F32, (2,)), "none": (F32, (0,))}) as writer:
        writer["x"].bits[:] = 0x3F800000

    assert safetensors.numpy.load_file(tmp_path / file)["x"].tolist() == [1, 1]
    assert Checkpoint(tmp_path / out).metadata == {"format": "pt"}


# Writing: files beside the weights


def write_beside(out: Path, files: dict[str, bytes], like: Checkpoint | None = None) -> None:
    with CheckpointWriter(out, schema={"a": (F32, (2, 3))}, like=like, files=files) as writer:
        writer["a"].bits[:] = 1


def test_side_files_are_written(tmp_path: Path) -> None:
    write_beside(tmp_path / "out", {"config.json": b"{}", "tokenizer/vocab.txt": b"hello"})

    assert tree(tmp_path / "out").keys() == {"config.json", "model.safetensors", "tokenizer/vocab.txt"}
    assert Checkpoint(tmp_path / "out").side_files == (Path("config.json"), Path("tokenizer/vocab.txt"))


def test_side_files_go_before_those_of_the_model(sharded: Path, tmp_path: Path) -> None:
    write_beside(tmp_path / "out", {"config.json": b"new", "more.json": b"more"}, Checkpoint(sharded))

    files = tree(tmp_path / "out")
    assert (files["config.json"], files["more.json"], files["tokenizer/vocab.txt"]) == (b"new", b"more", b"hello")


def test_a_file_has_no_side_files(tmp_path: Path) -> None:
    write_beside(tmp_path / "out.safetensors", {"config.json": b"{}"})

    assert list(tmp_path.iterdir()) == [tmp_path / "out.safetensors"]


@pytest.mark.parametrize(
    "name", ["", "/etc/x", "../x", "a/../../x", "a//b", "./x", "a\0b", "y.safetensors", "model.safetensors.index.json"]
)
def test_side_files_stay_in_their_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="cannot be a file beside weights"):
        write_beside(tmp_path / "out", {name: b""})

    assert not list(tmp_path.iterdir())


def test_side_files_in_each_others_way(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_beside(tmp_path / "out", {"a": b"", "a/b": b""})

    assert not list(tmp_path.iterdir())


# Writing: all or nothing


def test_after_an_exception_nothing_is_left(sharded: Path, single: Path, tmp_path: Path) -> None:
    def interrupted(base: Checkpoint, out: Path) -> None:
        with CheckpointWriter(out, schema=schema_of(base), like=base) as writer:
            writer["a"].bits[:] = 1
            raise KeyboardInterrupt

    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Checkpoint(sharded), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        interrupted(Checkpoint(single), single)

    assert tree(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_a_tensor_nobody_filled_in_is_not_published_as_zeros(single: Path, tmp_path: Path) -> None:
    base = Checkpoint(single)
    with (
        pytest.raises(OutputError, match="tensor 'b' was never filled in"),
        CheckpointWriter(tmp_path / "out", schema=schema_of(base), like=base) as writer,
    ):
        writer["a"].bits[:] = 1
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_is_replaced_even_while_it_is_read(single: Path) -> None:
    base = Checkpoint(single)
    with CheckpointWriter(single, schema=schema_of(base), like=base) as writer:
        for name, tensor in base.items():
            writer[name].bits[:] = ~tensor.bits

    assert (Checkpoint(single)["a"].bits == ~base["a"].bits).all()
    assert base["a"].bits.tobytes() == numbers(2, 3).tobytes()


def test_an_empty_directory_is_replaced_and_any_other_is_not(sharded: Path, tmp_path: Path) -> None:
    base, out = Checkpoint(sharded), tmp_path / "out"
    out.mkdir()
    copy(base, out)
    with pytest.raises(OutputError, match="out: exists and is not empty") as caught:
        copy(base, out)
    assert caught.value.hint
    assert tree(out) == tree(sharded)


def test_a_file_does_not_replace_a_directory_nor_the_other_way_round(
    sharded: Path, single: Path, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="is a file already"):
        copy(Checkpoint(sharded), single)
    with pytest.raises(OutputError, match="is a directory already"):
        copy(Checkpoint(single), sharded)


def test_the_files_have_the_usual_permissions(sharded: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        copy(Checkpoint(sharded), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").stat().st_mode & 0o777 == 0o640


# Writing: where it cannot be


def test_into_a_directory_that_is_not_there(single: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="absent/out: there is no directory") as caught:
        copy(Checkpoint(single), tmp_path / "absent" / "out")
    assert caught.value.hint == "create it first"


def test_more_than_the_disk_has_free(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with (
        pytest.raises(OutputError, match="bytes are needed") as caught,
        CheckpointWriter(tmp_path / "out.safetensors", schema={"x": (U8, (2 * free,))}),
    ):
        pass
    assert caught.value.hint == "free some space, or write to another disk"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_system_call_that_fails(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match=f"out: cannot be written .{os.strerror(code)}") as caught:
        copy(Checkpoint(sharded), tmp_path / "out")
    assert caught.value.hint
    assert os.listdir(tmp_path) == ["base"]


def test_a_file_system_that_cannot_allocate(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    copy(Checkpoint(sharded), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(sharded)


# What is not to be replaced


@pytest.mark.parametrize("there", ["notes", "fifo", "config"])
def test_what_is_no_safetensors_file_is_not_replaced(single: Path, tmp_path: Path, there: str) -> None:
    out = tmp_path / there
    if there == "fifo":
        os.mkfifo(out)
    else:
        out.write_text("precious")
    with pytest.raises(OutputError, match="exists, and is no safetensors file"):
        copy(Checkpoint(single), out)
    with pytest.raises(OutputError, match="exists, and is no safetensors file"), replacing(out) as file:
        file.write(b"new")
    assert not out.is_file() or out.read_text() == "precious"


def test_a_link_stays_and_its_target_is_replaced(single: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.safetensors", tmp_path / "link.safetensors"
    target.write_bytes(b"")
    link.symlink_to(target)
    copy(Checkpoint(single), link)
    assert link.is_symlink()
    assert target.read_bytes() == single.read_bytes()
