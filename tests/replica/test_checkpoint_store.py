"""The checkpoints of a replica: complete, never changed, and kept while somebody loads them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from support.replicas import STORY, check, checkpoints, loaded, reopened
from support.small_run import FILES, Story
from weightwire import digest
from weightwire.errors import ReplicaError
from weightwire.replica.replica import Replica
from weightwire.system import durable_files
from weightwire.weights.dtypes import DTYPES

pytestmark = pytest.mark.usefixtures("without_fsync")


def test_a_checkpoint_holds_weights_side_files_and_metadata(replica: Replica) -> None:
    STORY.advance(replica, 1)
    made = replica.checkpoint()
    current = replica.directory / "current"
    assert current.is_symlink()
    assert current.resolve() == made
    assert loaded(current) == STORY.bits[1]
    assert {name: (current / name).read_bytes() for name in FILES} == FILES
    about = json.loads((current / "weightwire.json").read_bytes())
    assert (about["run"], about["version"], about["state"]) == ("run", 1, STORY.states[1].hex)
    assert about["commit"] == STORY.at(1).commit
    assert replica.checkpoint() == made
    assert replica.journal_bytes == 0


def test_a_checkpoint_is_never_changed(replica: Replica) -> None:
    first = replica.checkpoint()
    with safetensors.safe_open(first / "model.safetensors", "np") as file:
        STORY.advance(replica, 1)
        replica.sync()
        assert loaded(first) == STORY.bits[0]
        second = replica.checkpoint()
        assert second != first
        assert loaded(second) == STORY.bits[1]
        assert file.get_tensor("norm").tobytes() == STORY.bits[0]["norm"]  # an open file keeps its contents
    assert os.listdir(replica.directory / "checkpoints") == [second.name]


def test_a_handed_out_checkpoint_stays_until_the_next_one(replica: Replica) -> None:
    first = replica.checkpoint()
    for version in (1, 2, 3):
        STORY.advance(replica, version)
        replica.make_current()
        assert loaded(first) == STORY.bits[0]
        assert checkpoints(replica) == [0, version]
    assert loaded(replica.checkpoint()) == STORY.bits[3]
    assert checkpoints(replica) == [3]


def test_a_lent_checkpoint_stays_until_all_borrowers_return_it(replica: Replica) -> None:
    first, same = replica.lend(), replica.lend()
    STORY.advance(replica, 1)
    replica.checkpoint()
    STORY.advance(replica, 2)
    replica.checkpoint()
    replica.give_back(same)
    assert first == same
    assert loaded(first) == STORY.bits[0]
    assert checkpoints(replica) == [0, 2]
    replica.give_back(first)
    assert checkpoints(replica) == [2]


def test_reopening_a_replica_removes_old_checkpoints(replica: Replica) -> None:
    handed_out = replica.checkpoint()
    replica.lend()
    STORY.advance(replica, 1)
    replica.make_current()
    replica.close()
    assert loaded(handed_out) == STORY.bits[0]
    with reopened(replica) as again:
        assert checkpoints(again) == [1]


def test_a_checkpoint_survives_a_rebuild(replica: Replica) -> None:
    other = Story(run="other", seed=7)
    replica.checkpoint()
    other.build(replica)
    assert loaded(replica.directory / "current") == STORY.bits[0]
    replica.checkpoint()
    assert loaded(replica.directory / "current") == other.bits[0]


def test_a_deleted_checkpoint_is_made_again(replica: Replica) -> None:
    made = replica.checkpoint()
    (made / "model.safetensors").unlink()
    assert loaded(replica.checkpoint()) == STORY.bits[0]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", ".", "a\0"])
def test_side_files_outside_the_checkpoint_are_refused(replica: Replica, name: str) -> None:
    with pytest.raises(ReplicaError, match="not a valid name for a side file"):
        replica.rebuild(STORY.schema, {name: b""})


def test_side_files_that_conflict_with_the_weights_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    files: dict[str, bytes | Path] = {
        "model.safetensors": b"?",
        "model.safetensors.index.json": b"?",
        "weightwire.json": b"?",
        "tokenizer.json": tmp_path / "tokenizer.json",
    }
    weights = {"x": np.arange(4, dtype=np.uint8)}
    with Replica.open(tmp_path / "replica") as replica:
        with replica.rebuild({"x": (DTYPES["U8"], (4,))}, files) as new:
            new["x"].bits[:] = weights["x"]
            new.finish(STORY.at(0), digest(weights))
        made = replica.checkpoint()
    assert sorted(os.listdir(made)) == ["model.safetensors", "tokenizer.json", "weightwire.json"]
    assert loaded(made) == {"x": bytes(range(4))}


def test_shared_blocks_need_free_space(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file system shares blocks, the first write to a page needs a new block, or raises SIGBUS."""
    real = durable_files.clone_file
    monkeypatch.setattr(durable_files, "clone_file", lambda *paths: real(*paths) or True)
    replica.checkpoint()
    with reopened(replica) as again:
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(ReplicaError, match="bytes are needed, 1,000 are free"):
            STORY.advance(again, 1)
        check(again, 0)
        monkeypatch.undo()
        STORY.advance(again, 1)
        check(again, 1)
