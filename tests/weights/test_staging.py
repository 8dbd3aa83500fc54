"""A killed writer leaves its output in the making behind. The next writer of the same output removes it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.numpy

from support.checkpoints import numbers
from support.commands import weightwire
from weightwire.weights.checkpoint_writer import replacing
from weightwire.weights.staging import hold_staging, new_staging, release_staging, sweep_staging

WRITER = """
import os, sys, time
from pathlib import Path
from weightwire.weights import CheckpointWriter, DTYPES, replacing
out = sys.argv[1]
if sys.argv[2] == "file":
    with replacing(out) as file:
        print("writing", flush=True)
        time.sleep(60)
else:
    with CheckpointWriter(out, schema={"a": (DTYPES["F32"], (10,))}):
        print("writing", flush=True)
        time.sleep(60)
"""


def leftovers(directory: Path) -> list[Path]:
    return sorted(directory.glob(".weightwire-*.partial"))


def age(path: Path) -> None:
    """Makes it old enough to be swept."""
    os.utime(path, (time.time() - 3600,) * 2)


@pytest.fixture(params=["file", "single", "directory"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    kind = request.param
    return tmp_path / ("out" if kind == "directory" else "out.safetensors"), kind


def start(out: Path, kind: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, out, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    return process


def test_only_the_leftover_of_a_killed_writer_is_swept(out: tuple[Path, str]) -> None:
    path, kind = out
    with start(path, kind) as process:
        (left,) = leftovers(path.parent)
        age(left)
        sweep_staging(path)
        assert leftovers(path.parent) == [left]
        process.send_signal(signal.SIGKILL)
        process.wait()
    sweep_staging(path.with_name("another"))
    assert leftovers(path.parent) == [left]
    sweep_staging(path)
    assert leftovers(path.parent) == []


def test_a_young_leftover_stays(tmp_path: Path) -> None:
    """Its writer may not have locked it yet."""
    left = new_staging(tmp_path / "out")
    left.touch()
    sweep_staging(tmp_path / "out")
    assert left.exists()
    age(left)
    sweep_staging(tmp_path / "out")
    assert not left.exists()


def test_leftovers_of_other_machines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = new_staging(tmp_path / "out")
    left.touch()
    age(left)
    monkeypatch.setattr(platform, "node", lambda: "another")
    sweep_staging(tmp_path / "out")
    assert left.exists()


def test_a_link_in_place_of_a_leftover_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    left = new_staging(tmp_path / "out")
    left.symlink_to(tmp_path / "precious")
    os.utime(left, (0, 0), follow_symlinks=False)
    sweep_staging(tmp_path / "out")
    assert (tmp_path / "precious" / "file").exists()


def test_a_lock_ends_with_its_release(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lock = hold_staging(tmp_path / "file")
    assert lock is not None
    assert hold_staging(tmp_path / "file") is None
    release_staging(lock)
    again = hold_staging(tmp_path / "file")
    assert again is not None
    release_staging(again)


def test_writing_leaves_no_open_file(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with replacing(tmp_path / "out.safetensors") as file:
        file.write(b"")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_diff_sweeps_the_leftover_of_a_killed_diff(tmp_path: Path) -> None:
    for name, value in (("old", 1), ("new", 2)):
        safetensors.numpy.save_file({"a": numbers(2, 3) + value}, tmp_path / f"{name}.safetensors")
    out = tmp_path / "delta.safetensors"
    left = new_staging(out)
    left.touch()
    age(left)
    ran = weightwire("diff", tmp_path / "old.safetensors", tmp_path / "new.safetensors", "-o", out)
    assert ran.code == 0, ran.err
    assert leftovers(tmp_path) == []
