"""Regular files are opened, and nothing else blocks a reader."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import pytest

from support.special_files import fifo_at, in_time
from weightwire.system import NotRegularFile, durable_files, open_regular, read_regular


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some")
    (tmp_path / "link").symlink_to("file")

    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"some"


def test_a_fifo_is_rejected_at_once(tmp_path: Path) -> None:
    with fifo_at(tmp_path / "fifo"):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            found = in_time(partial(open_regular, tmp_path / "fifo", flags))
            assert isinstance(found, NotRegularFile)


def test_sockets_devices_and_directories_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path in ("socket", "/dev/zero", "/dev/null", "."):
            with pytest.raises(NotRegularFile, match="not a regular file"):
                read_regular(path)


def test_nothing_stays_open(tmp_path: Path) -> None:
    for _ in range(5):
        with pytest.raises(NotRegularFile):
            open_regular(tmp_path)
    # Not their number: other threads of this process open and close files meanwhile.
    assert str(tmp_path) not in [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]


def test_write_file_replaces_a_fifo_at_its_partial_name(tmp_path: Path) -> None:
    with fifo_at(tmp_path / "file.partial"):
        assert in_time(lambda: durable_files.write_file(tmp_path / "file", b"some")) is None
    assert (tmp_path / "file").read_bytes() == b"some"


def test_syncing_a_tree_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    with fifo_at(tmp_path / "fifo"):
        in_time(lambda: durable_files.sync_tree(tmp_path))
