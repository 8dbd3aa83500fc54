"""Durable files. Tests of their users simulate power cuts."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.disk import Disk, at_every_step
from weightwire.system import durable_files, open_regular


def test_write_file_replaces_the_content(tmp_path: Path) -> None:
    durable_files.write_file(tmp_path / "file", b"one")
    durable_files.write_file(tmp_path / "file", b"two" * 100_000)
    assert (tmp_path / "file").read_bytes() == b"two" * 100_000
    assert os.listdir(tmp_path) == ["file"]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable_files.write_file(tmp_path / "file", b"one")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        durable_files.write_file(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]


def test_point_replaces_an_existing_link(tmp_path: Path) -> None:
    (tmp_path / "link.partial").symlink_to("left by a crash")
    for target in ("a", "b"):
        (tmp_path / target).mkdir()
        durable_files.point(tmp_path / "link", target)
        assert (tmp_path / "link").resolve() == (tmp_path / target).resolve()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "link"]


@pytest.mark.parametrize("without", ["nothing", "sharing", "copying in the kernel"])
def test_clone_file_copies_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "not supported here")

    if without != "nothing":
        monkeypatch.setattr(fcntl, "ioctl", refused)
    if without == "copying in the kernel":
        monkeypatch.setattr(os, "copy_file_range", refused, raising=False)
    data = os.urandom(3_000_001)
    (tmp_path / "old").write_bytes(data)
    shared = durable_files.clone_file(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == data
    assert not (shared and without != "nothing")
    with pytest.raises(FileExistsError):
        durable_files.clone_file(tmp_path / "old", tmp_path / "new")


def test_clone_file_continues_after_an_error_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "copy_file_range"):
        pytest.skip("no copy_file_range on this system")
    real, calls = os.copy_file_range, iter(range(9))

    def once(old: int, new: int, count: int, *at: int) -> int:
        if next(calls):
            raise OSError(errno.EIO, "enough")
        return real(old, new, 1000, *at)

    monkeypatch.setattr(os, "copy_file_range", once)
    data = os.urandom(5000)
    (tmp_path / "old").write_bytes(data)
    durable_files.clone_file(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == data


def test_lock_is_exclusive(tmp_path: Path) -> None:
    lock = durable_files.lock_file(tmp_path / "lock")
    assert lock is not None
    assert durable_files.lock_file(tmp_path / "lock") is None
    os.close(lock)
    again = durable_files.lock_file(tmp_path / "lock")
    assert again is not None
    os.close(again)


def test_lock_of_a_file_that_its_holder_removes_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next one would create and lock another file, and two would hold the lock."""
    path = tmp_path / "lock"

    def open_and_lose(*args: Any) -> int:
        monkeypatch.setattr(durable_files, "open_regular", open_regular)
        fd = open_regular(*args)
        path.unlink()
        return fd

    monkeypatch.setattr(durable_files, "open_regular", open_and_lose)
    lock = durable_files.lock_file(path)
    assert lock is not None
    assert durable_files.lock_file(path) is None
    os.close(lock)


def test_remove_deletes_files_links_and_trees(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("!")
    (tmp_path / "link").symlink_to("folder")
    durable_files.remove(tmp_path / "link")
    assert (tmp_path / "folder" / "inner" / "file").exists()
    durable_files.remove(tmp_path / "folder")
    durable_files.remove(tmp_path / "folder")
    assert not os.listdir(tmp_path)


def test_flush_writes_a_memory_map(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with (tmp_path / "file").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    memory[9_999] = 7
    durable_files.flush(memory, tmp_path / "file")
    assert (tmp_path / "file").read_bytes()[9_999] == 7


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="what is synced is looked up in /proc")
@pytest.mark.parametrize("change", ["make_directory", "write_file", "point"])
def test_a_change_is_on_disk_when_the_function_returns(tmp_path: Path, change: str) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    root.mkdir()
    calls: dict[str, Callable[[Path], None]] = {
        "make_directory": durable_files.make_directory,
        "write_file": lambda path: durable_files.write_file(path, b"whole"),
        "point": lambda path: durable_files.point(path, "target"),
    }
    with Disk(root) as disk, at_every_step(lambda name: None, disk.after):
        calls[change](root / "made")
        for seed in range(20):
            disk.cut(copy, seed)
            assert [path.name for path in copy.iterdir()] == ["made"]
            assert change != "write_file" or (copy / "made").read_bytes() == b"whole"
            shutil.rmtree(copy)
