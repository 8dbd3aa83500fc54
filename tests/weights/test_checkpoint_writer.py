"""Writing a checkpoint: completely or not at all, and the same bits give the same files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.checkpoints import Arrays, numbers, tree
from weightwire.errors import OutputError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.checkpoint_writer import CheckpointWriter, replacing
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.schema import Schema, schema_of_weights

F32, BF16, U8 = DTYPES["F32"], DTYPES["BF16"], DTYPES["U8"]


def copy(base: Checkpoint, out: Path, schema: Schema | None = None) -> None:
    """Writes the tensors of `base`, and zeros for others."""
    with CheckpointWriter(out, schema=schema or schema_of_weights(base), like=base) as writer:
        for name in schema or base:
            tensor = writer[name]
            if name in base and base[name].shape == tensor.shape:
                tensor.bits[:] = base[name].bits


# Writing: the same bits give the same files


def test_a_copy_of_a_directory_is_the_same_bytes(sharded: Path, tmp_path: Path) -> None:
    copy(Checkpoint(sharded), tmp_path / "out")

    assert tree(tmp_path / "out") == tree(sharded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_a_copy_of_a_file_keeps_the_layout_of_its_writer(tmp_path: Path) -> None:
    head = b'{ "x": {"shape": [2], "dtype": "F32", "data_offsets": [0, 8]} }'
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + numbers(2).tobytes())

    copy(Checkpoint(path), tmp_path / "out.safetensors")

    assert (tmp_path / "out.safetensors").read_bytes() == path.read_bytes()


def test_only_changed_bits_differ(sharded: Path, tmp_path: Path) -> None:
    base = Checkpoint(sharded)
    with CheckpointWriter(tmp_path / "out", schema=schema_of_weights(base), like=base) as writer:
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


# Writing: added and removed tensors


def test_added_tensors_go_to_the_last_shard_and_removed_ones_leave(sharded: Path, tmp_path: Path) -> None:
    base = Checkpoint(sharded)
    schema = schema_of_weights(base) | {"e": (BF16, (3,)), "odd": (U8, (3,)), "d": (F32, (2, 3))}
    del schema["a"]
    copy(base, tmp_path / "out", schema)

    out = Checkpoint(tmp_path / "out")
    assert schema_of_weights(out) == schema
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


def test_a_shard_without_tensors_is_removed(sharded: Path, tmp_path: Path) -> None:
    base = Checkpoint(sharded)
    copy(base, tmp_path / "out", {"d": (F32, (2, 2))})

    out = Checkpoint(tmp_path / "out")
    assert [file.path.name for file in out.files] == ["model-00002-of-00002.safetensors"]
    assert out["d"].bits.tobytes() == base["d"].bits.tobytes()


def test_a_new_layout_is_that_of_stock_safetensors(single: Path, tmp_path: Path) -> None:
    base = Checkpoint(single)
    copy(base, tmp_path / "out.safetensors", schema_of_weights(base) | {"aa": (F32, (1,)), "n": (U8, (3,))})

    arrays: Arrays = {"a": numbers(2, 3), "b": numbers(4), "aa": numbers(1), "n": np.zeros(3, np.uint8)}
    expected = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    assert (tmp_path / "out.safetensors").read_bytes() == expected


def test_a_checkpoint_without_tensors_is_written(single: Path, tmp_path: Path) -> None:
    base = Checkpoint(single)
    with CheckpointWriter(tmp_path / "out.safetensors", schema={}, like=base):
        pass
    assert safetensors.numpy.load_file(tmp_path / "out.safetensors") == {}


@pytest.mark.parametrize(("out", "file"), [("new.safetensors", "new.safetensors"), ("new", "new/model.safetensors")])
def test_the_name_chooses_file_or_directory_without_like(tmp_path: Path, out: str, file: str) -> None:
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


def test_given_side_files_replace_those_of_like(sharded: Path, tmp_path: Path) -> None:
    write_beside(tmp_path / "out", {"config.json": b"new", "more.json": b"more"}, Checkpoint(sharded))

    files = tree(tmp_path / "out")
    assert (files["config.json"], files["more.json"], files["tokenizer/vocab.txt"]) == (b"new", b"more", b"hello")


def test_a_file_has_no_side_files(tmp_path: Path) -> None:
    write_beside(tmp_path / "out.safetensors", {"config.json": b"{}"})

    assert list(tmp_path.iterdir()) == [tmp_path / "out.safetensors"]


@pytest.mark.parametrize(
    "name", ["", "/etc/x", "../x", "a/../../x", "a//b", "./x", "a\0b", "y.safetensors", "model.safetensors.index.json"]
)
def test_side_files_outside_the_directory_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="cannot be a side file"):
        write_beside(tmp_path / "out", {name: b""})

    assert not list(tmp_path.iterdir())


def test_conflicting_side_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_beside(tmp_path / "out", {"a": b"", "a/b": b""})

    assert not list(tmp_path.iterdir())


# Writing: all or nothing


def test_an_exception_leaves_no_files(sharded: Path, single: Path, tmp_path: Path) -> None:
    def interrupted(base: Checkpoint, out: Path) -> None:
        with CheckpointWriter(out, schema=schema_of_weights(base), like=base) as writer:
            writer["a"].bits[:] = 1
            raise KeyboardInterrupt

    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Checkpoint(sharded), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        interrupted(Checkpoint(single), single)

    assert tree(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_an_unwritten_tensor_is_an_error(single: Path, tmp_path: Path) -> None:
    base = Checkpoint(single)
    with (
        pytest.raises(OutputError, match="tensor 'b' was not written"),
        CheckpointWriter(tmp_path / "out", schema=schema_of_weights(base), like=base) as writer,
    ):
        writer["a"].bits[:] = 1
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_file_is_replaced_even_while_it_is_read(single: Path) -> None:
    base = Checkpoint(single)
    with CheckpointWriter(single, schema=schema_of_weights(base), like=base) as writer:
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
    with pytest.raises(OutputError, match="is a file, not a directory"):
        copy(Checkpoint(sharded), single)
    with pytest.raises(OutputError, match="is a directory, not a file"):
        copy(Checkpoint(single), sharded)


def test_the_files_have_the_usual_permissions(sharded: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        copy(Checkpoint(sharded), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").stat().st_mode & 0o777 == 0o640


# Writing: errors


def test_a_missing_parent_directory_is_an_error(single: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="absent/out: directory") as caught:
        copy(Checkpoint(single), tmp_path / "absent" / "out")
    assert caught.value.hint == "create it first"


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with (
        pytest.raises(OutputError, match=r"needs .* bytes") as caught,
        CheckpointWriter(tmp_path / "out.safetensors", schema={"x": (U8, (2 * free,))}),
    ):
        pass
    assert caught.value.hint == "free some space, or write to another disk"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_failing_system_call_is_an_error(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match=f"out: cannot be written .{os.strerror(code)}") as caught:
        copy(Checkpoint(sharded), tmp_path / "out")
    assert caught.value.hint
    assert os.listdir(tmp_path) == ["base"]


def test_a_file_system_that_cannot_allocate_is_written_to(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    copy(Checkpoint(sharded), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(sharded)


# Existing files


@pytest.mark.parametrize("there", ["notes", "fifo", "config"])
def test_files_of_another_kind_are_not_replaced(single: Path, tmp_path: Path, there: str) -> None:
    out = tmp_path / there
    if there == "fifo":
        os.mkfifo(out)
    else:
        out.write_text("precious")
    with pytest.raises(OutputError, match="exists and is not a safetensors file"):
        copy(Checkpoint(single), out)
    with pytest.raises(OutputError, match="exists and is not a safetensors file"), replacing(out) as file:
        file.write(b"new")
    assert not out.is_file() or out.read_text() == "precious"


def test_a_link_stays_and_its_target_is_replaced(single: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.safetensors", tmp_path / "link.safetensors"
    target.write_bytes(b"")
    link.symlink_to(target)
    copy(Checkpoint(single), link)
    assert link.is_symlink()
    assert target.read_bytes() == single.read_bytes()
