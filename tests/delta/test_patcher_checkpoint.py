"""A delta applied to a checkpoint on disk: written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from support.patch_checks import Arrays, bytes_of
from weightwire import (
    CorruptDelta,
    Delta,
    WrongBase,
    diff,
    digest,
)
from weightwire.delta.patcher import patch_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Delta, Arrays]:
    old: Arrays = {"x": np.arange(6400, dtype=np.float32).reshape(100, 64), "y": np.zeros(9, np.float16)}
    new: Arrays = {"x": old["x"] + 1, "z": np.ones(3)}
    safetensors.numpy.save_file(old, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors", diff(old, new), new


def test_a_checkpoint_is_patched_into_a_new_file(saved: tuple[Path, Delta, Arrays], tmp_path: Path) -> None:
    path, delta, new = saved
    state = patch_checkpoint(path, delta, tmp_path / "new.safetensors")
    assert state == digest(new)
    assert bytes_of(tmp_path / "new.safetensors") == bytes_of(new)
    assert digest(path).hex == delta.before


def damaged(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


@pytest.mark.parametrize(
    "harm",
    [damaged, lambda data: data[:-1], lambda data: data + b"\0", lambda data: data[:300]],
    ids=["flipped", "cut", "longer", "header only"],
)
def test_a_bad_delta_leaves_the_output_untouched(
    saved: tuple[Path, Delta, Arrays], tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    path, delta, _ = saved
    precious = path.read_bytes()
    (tmp_path / "bad").write_bytes(harm(delta.to_bytes()))
    for out in (tmp_path / "new.safetensors", tmp_path / "there.safetensors"):
        if out.name == "there.safetensors":
            out.write_bytes(precious)
        listed = sorted(os.listdir(tmp_path))
        with pytest.raises(CorruptDelta, match=str(tmp_path / "bad")):
            patch_checkpoint(path, tmp_path / "bad", out)
        assert sorted(os.listdir(tmp_path)) == listed
    assert (tmp_path / "there.safetensors").read_bytes() == precious


def test_the_wrong_checkpoint_is_refused(saved: tuple[Path, Delta, Arrays], tmp_path: Path) -> None:
    _, delta, new = saved
    safetensors.numpy.save_file(new, tmp_path / "other.safetensors")
    with pytest.raises(WrongBase):
        patch_checkpoint(tmp_path / "other.safetensors", delta, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_progress_counts_every_byte_twice(saved: tuple[Path, Delta, Arrays], tmp_path: Path) -> None:
    path, delta, _ = saved
    heard: list[int] = []
    patch_checkpoint(path, delta, tmp_path / "new.safetensors", progress=heard.append)
    assert sum(heard) == (6400 * 4 + 9 * 2) + 6400 * 4  # all for the digest, then the copies of the remaining tensors
