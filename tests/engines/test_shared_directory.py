"""The directory that a follower and its server share: one follower at a time, and nothing is left."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from weightwire.engines.shared_directory import PAUSED, SharedDirectory
from weightwire.errors import Closed, EngineError
from weightwire.system import durable_files


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path / "shared", "engine")


def test_released_directory_is_removed(shared: SharedDirectory) -> None:
    shared.lock()
    shared.lock()
    (shared.path / "7.safetensors").write_bytes(b"a patch")
    shared.close()
    assert not shared.path.exists()
    shared.close()


def test_mark_of_a_paused_server_stays(shared: SharedDirectory) -> None:
    shared.lock()
    (shared.path / PAUSED).touch()
    (shared.path / "7.safetensors").write_bytes(b"a patch")
    shared.close()
    assert {path.name for path in shared.path.iterdir()} == {"lock", PAUSED}
    again = SharedDirectory(shared.path, "engine")
    again.lock()
    (again.path / PAUSED).unlink()
    again.close()
    assert not shared.path.exists()


def test_leftovers_of_a_killed_follower_are_removed(shared: SharedDirectory) -> None:
    shared.path.mkdir()
    (shared.path / "7.safetensors").write_bytes(b"a patch")
    shared.lock()
    assert [path.name for path in shared.path.iterdir()] == ["lock"]
    shared.close()


def test_directories_of_followers_that_were_killed_are_removed(tmp_path: Path) -> None:
    names = ["killed", "paused", "young", "alive", "foreign"]
    paths = {name: tmp_path / f"weightwire-0-{name}" for name in names} | {"other": tmp_path / "weightwire-1-killed"}
    for name, path in paths.items():
        path.mkdir()
        (path / "7.safetensors").write_bytes(b"a patch")
        if name != "foreign":
            (path / "lock").touch()
        if name == "paused":
            (path / PAUSED).touch()
        if name != "young":
            os.utime(path, (0, 0))
    held = durable_files.lock_file(paths["alive"] / "lock")
    assert held is not None
    shared = SharedDirectory(tmp_path / "weightwire-0-8000", "engine")
    shared.lock()
    shared.close()
    os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths.values()} - {
        "weightwire-0-killed"
    }
    assert {path.name for path in paths["paused"].iterdir()} == {"lock", PAUSED}
    assert (paths["alive"] / "7.safetensors").exists()


def test_second_follower_is_refused_and_removes_nothing(shared: SharedDirectory) -> None:
    shared.lock()
    second = SharedDirectory(shared.path, "engine")
    with pytest.raises(EngineError, match="engine: another follower updates this engine"):
        second.lock()
    second.close()
    assert shared.path.exists()
    shared.close()
    third = SharedDirectory(shared.path, "engine")
    third.lock()
    third.close()


def test_directory_that_was_deleted_is_made_again(shared: SharedDirectory) -> None:
    shared.lock()
    (shared.path / "lock").unlink()
    shared.path.rmdir()
    shared.lock()
    assert shared.path.is_dir()
    shared.close()


def test_closed_directory_is_not_locked_again(shared: SharedDirectory) -> None:
    """A thread that still works for a closed engine would keep the lock for ever."""
    shared.lock()
    shared.close()
    with pytest.raises(Closed, match="this engine is closed"):
        shared.lock()
    assert not shared.path.exists()


def test_sessions_of_one_server_exclude_each_other_and_leave_nothing(tmp_path: Path) -> None:
    of_model, of_draft = (SharedDirectory(tmp_path / "weightwire-0-8000", "engine", part) for part in ("", "draft"))
    assert of_draft.paused_mark == of_model.paused_mark
    with of_model.session():
        thread = threading.Thread(target=use_session, args=(of_draft,))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()
    assert not list(tmp_path.iterdir())


def use_session(shared: SharedDirectory) -> None:
    with shared.session():
        pass


def test_a_closed_directory_does_not_wait_for_a_session(tmp_path: Path) -> None:
    first, second = (SharedDirectory(tmp_path / "weightwire-0-8000", "engine", part) for part in ("", "draft"))
    second.close()
    with first.session(), pytest.raises(Closed), second.session():
        pass


def test_the_lock_of_a_killed_session_is_removed_by_a_later_follower(tmp_path: Path) -> None:
    old, young = tmp_path / "weightwire-0-1.session", tmp_path / "weightwire-0-2.session"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    shared = SharedDirectory(tmp_path / "weightwire-0-8000", "engine")
    shared.lock()
    shared.close()
    assert [path.name for path in tmp_path.iterdir()] == [young.name]
