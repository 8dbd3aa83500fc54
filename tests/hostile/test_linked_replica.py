"""Links in a replica directory: nothing outside is changed, and the weights are right or the error says what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hostile.attacks import HELD, NEXT, DirectoryRun, published_run
from support.commands import tree
from support.followers import current, ignore
from support.small_run import bits_of
from weightwire import Follower, ReplicaError
from weightwire.system import durable_files

REFUSED = ["lock", "works", "checkpoints"]
REBUILT = [
    "work",
    "work/",
    "work/model.safetensors",
    "work/state.json",
    "work/journal",
    "work/files",
    "work/files/config.json",
    "name",
    "name.place",
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryRun:
    """A replica of version 3, and version 5 to follow."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    run = DirectoryRun(tmp_path / "run")
    run.show(HELD)
    follow(run, tmp_path)
    run.show(NEXT)
    return run


def follow(run: DirectoryRun, tmp_path: Path) -> None:
    with Follower(run.root, into=tmp_path / "replica", threads=1, on_event=ignore) as follower:
        newest = follower.once()
        assert bits_of(follower.replica.weights) == published_run()[1][newest]
    assert current(tmp_path / "replica") == newest
    assert bits_of(tmp_path / "replica" / "current") == published_run()[1][newest]


def link_out(tmp_path: Path, name: str) -> dict[str, bytes]:
    """Moves a part of the replica outside and links to it. Returns what is outside."""
    link, outside = tmp_path / "replica" / name, tmp_path / "outside"
    if name.endswith("/"):  # the directory that a link of the replica points to
        link = link.resolve()
    outside.mkdir()
    shutil.copytree(link, outside / "it") if link.is_dir() else shutil.copy(link, outside / "it")
    (outside / "left.partial").write_bytes(b"not yours")
    if (outside / "it").is_dir():
        (outside / "it" / "0123abcd").write_bytes(b"not yours")  # a name that weightwire gives
    durable_files.remove(link)
    link.symlink_to(outside / "it")
    return tree(outside)


@pytest.mark.parametrize("name", REFUSED)
def test_a_replica_whose_own_parts_are_links_is_refused(run: DirectoryRun, tmp_path: Path, name: str) -> None:
    before = link_out(tmp_path, name)
    with pytest.raises(ReplicaError, match="symbolic link") as caught:
        follow(run, tmp_path)
    assert caught.value.hint
    assert tree(tmp_path / "outside") == before
    shutil.rmtree(tmp_path / "replica")
    follow(run, tmp_path)


@pytest.mark.parametrize("name", REBUILT)
def test_weights_behind_a_link_are_not_used_and_not_changed(run: DirectoryRun, tmp_path: Path, name: str) -> None:
    before = link_out(tmp_path, name)
    follow(run, tmp_path)
    assert tree(tmp_path / "outside") == before


@pytest.mark.parametrize("name", ["current", "current/"])
def test_a_checkpoint_behind_a_link_is_not_served(run: DirectoryRun, tmp_path: Path, name: str) -> None:
    """It claims to be the version held, and has other weights."""
    run.show(HELD)
    link_out(tmp_path, name)
    model = tmp_path / "outside" / "it" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    before = tree(tmp_path / "outside")
    follow(run, tmp_path)
    assert tree(tmp_path / "outside") == before
