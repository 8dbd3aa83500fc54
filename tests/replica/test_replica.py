"""A replica advances from version to version, refuses unfitting deltas, and locks its directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.replicas import STORY, check, loaded, reopened
from support.small_run import bits_of
from support.special_files import fifo_at, in_time
from weightwire import CorruptDelta, Delta, Tensor, WrongBase, anchor, diff, digest, patch
from weightwire.delta.absolute import write_absolute
from weightwire.errors import ForeignRun, ReplicaError, SchemaChanged
from weightwire.replica.replica import Replica
from weightwire.replica.workdir import Position

pytestmark = pytest.mark.usefixtures("without_fsync")


def test_an_empty_replica_must_be_rebuilt(tmp_path: Path) -> None:
    with Replica.open(tmp_path / "new" / "replica") as replica:
        assert replica.position is None
        assert replica.state is None
        assert replica.trouble is None
        assert not replica.weights
        assert replica.journal_bytes == 0
        calls: list[Callable[[], Any]] = [
            replica.sync,
            replica.verify,
            replica.checkpoint,
            lambda: replica.merge([]),
            lambda: STORY.advance(replica, 1),
        ]
        for call in calls:
            with pytest.raises(ReplicaError, match="holds nothing") as caught:
                call()
            assert caught.value.hint == "rebuild it"


@pytest.mark.parametrize("threads", [1, 3])
def test_replica_advances_version_by_version(tmp_path: Path, threads: int) -> None:
    with Replica.open(tmp_path, threads=threads) as replica:
        STORY.build(replica)
        for version in range(1, STORY.last + 1):
            STORY.advance(replica, version)
            check(replica, version)
    with Replica.open(tmp_path) as replica:
        check(replica, STORY.last)


def test_a_patch_has_absolute_values(replica: Replica) -> None:
    made = STORY.advance(replica, 1)
    assert (made.before, made.after) == (STORY.states[0].hex, STORY.states[1].hex)
    assert made.where == "version 1"
    assert made.entries["embed"].coo
    assert made.entries["norm"].fresh  # all of it changed, so positions would double the size
    held = {name: Tensor(t.dtype, t.shape, t.bits.copy()) for name, t in STORY.versions[0].items()}
    patch(held, made)
    assert bits_of(held) == STORY.bits[1]
    write_absolute(held, made)
    assert bits_of(held) == STORY.bits[1]
    assert made.advance(STORY.states[0]) == STORY.states[1]


def test_a_version_may_change_nothing(replica: Replica) -> None:
    made = replica.advance([], STORY.at(1), STORY.states[0].hex)
    assert not made.entries
    assert made.before == made.after == STORY.states[0].hex
    assert replica.position == STORY.at(1)
    with reopened(replica) as again:
        assert again.position == STORY.at(1)
        assert bits_of(again.weights) == STORY.bits[0]


def test_one_delta_may_span_several_versions(replica: Replica) -> None:
    replica.advance([diff(STORY.versions[0], STORY.versions[4])], STORY.at(4), STORY.states[4].hex)
    check(replica, 4)
    with reopened(replica) as again:
        check(again, 4)


def test_an_anchor_may_be_applied_like_a_delta(replica: Replica) -> None:
    made = replica.advance([anchor(STORY.versions[3])], STORY.at(3), STORY.states[3].hex)
    assert made.before == STORY.states[0].hex
    check(replica, 3)
    with reopened(replica) as again:
        check(again, 3)


def test_the_weights_of_a_replica_are_read_only(replica: Replica) -> None:
    with pytest.raises(ValueError, match="read-only"):
        replica.weights["embed"].bits[0] = 1


def test_patches_of_several_versions_are_merged_into_one(replica: Replica) -> None:
    patches = [STORY.advance(replica, version) for version in range(1, 6)]
    merged = replica.merge(patches[1:])
    assert (merged.before, merged.after) == (STORY.states[1].hex, STORY.states[5].hex)
    held = {name: Tensor(t.dtype, t.shape, t.bits.copy()) for name, t in STORY.versions[1].items()}
    patch(held, merged)
    assert bits_of(held) == STORY.bits[5]
    assert not replica.merge([]).entries
    assert replica.merge(patches[4:]) is patches[4]
    with pytest.raises(WrongBase, match="the weights have"):
        replica.merge(patches[:2])
    with pytest.raises(WrongBase, match="does not follow"):
        replica.merge([patches[0], patches[4]])


def test_a_delta_for_other_weights_is_refused(replica: Replica) -> None:
    with pytest.raises(WrongBase, match="made for weights with state"):
        replica.advance(STORY.deltas(2), STORY.at(2), STORY.states[2].hex)
    check(replica, 0)
    assert replica.journal_bytes == 0


@pytest.mark.parametrize("name", ["embed", "norm"])
def test_a_damaged_delta_is_refused(replica: Replica, name: str) -> None:
    delta = STORY.deltas(1)[0]
    data = bytearray(delta.to_bytes())
    data[delta.byte_range(name)[1] - 3] ^= 0x10
    with pytest.raises(CorruptDelta):
        replica.advance([Delta.from_bytes(bytes(data))], STORY.at(1), STORY.states[1].hex)
    check(replica, 0)
    assert not list((replica.directory / "work" / "journal").iterdir())
    STORY.advance(replica, 1)
    check(replica, 1)


def test_a_delta_that_leads_to_another_state_is_refused(replica: Replica) -> None:
    """The file is valid, but does not give the state in the commit."""
    with pytest.raises(CorruptDelta, match="the result has state"):
        replica.advance(STORY.deltas(1), STORY.at(1), STORY.states[2].hex)
    with pytest.raises(CorruptDelta, match="version without files"):
        replica.advance([], STORY.at(1), STORY.states[1].hex)
    check(replica, 0)


def test_a_version_of_another_run_is_refused(replica: Replica) -> None:
    with pytest.raises(ForeignRun, match="holds run run, not other"):
        replica.advance([], Position("other", 1, "0" * 64), STORY.states[0].hex)


def test_an_older_version_is_refused(replica: Replica) -> None:
    with pytest.raises(ReplicaError, match="already at version 0, so version 0 cannot be applied"):
        replica.advance([], STORY.at(0), STORY.states[0].hex)


def test_a_delta_with_other_tensors_is_refused(replica: Replica) -> None:
    old = STORY.versions[0]
    for new in ({**old, "more": np.zeros(3)}, {name: old[name] for name in old if name != "norm"}):
        with pytest.raises(SchemaChanged, match="is added, removed or reshaped"):
            replica.advance([diff(old, new)], STORY.at(1), digest(new).hex)
    check(replica, 0)


@pytest.mark.parametrize("commit", ["", "0" * 63, "../../../etc/passwd", "G" * 64])
def test_a_position_needs_the_hash_of_a_commit(commit: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        Position("run", 1, commit)


def test_an_interrupt_before_anything_is_written_changes_nothing(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weightwire.replica.replica.make_absolute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        STORY.advance(replica, 1)
    monkeypatch.undo()
    check(replica, 0)
    STORY.advance(replica, 1)
    check(replica, 1)


def test_an_interrupt_is_raised_after_the_version_is_applied(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version in the journal counts as applied."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)  # gives the main thread time to receive the interrupt
        return write_absolute(*args, **kwargs)

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        STORY.advance(replica, 1)
    check(replica, 1)


def test_two_followers_cannot_share_a_replica(replica: Replica) -> None:
    with pytest.raises(ReplicaError, match="in use by another follower") as caught:
        Replica.open(replica.directory)
    assert caught.value.hint
    STORY.advance(replica, 1)
    check(replica, 1)
    with reopened(replica):
        pass
    replica.close()


def test_a_closed_replica_raises_an_error(replica: Replica) -> None:
    replica.close()
    for call in (replica.sync, replica.checkpoint, lambda: replica.rebuild(STORY.schema)):
        with pytest.raises(ReplicaError, match="is closed"):
            call()
    assert replica.position is None


@pytest.mark.parametrize("names", [["notes.txt"], ["checkpoints"], ["lock", "checkpoints"]])
def test_a_directory_with_other_files_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        if name == "checkpoints":
            (tmp_path / name).mkdir()
            (tmp_path / name / "precious").write_text("!")
        else:
            (tmp_path / name).write_text("")
    with pytest.raises(ReplicaError) as caught:
        Replica.open(tmp_path)
    assert caught.value.hint == "use a new directory for the replica"
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert "checkpoints" not in names or (tmp_path / "checkpoints" / "precious").exists()


def test_a_fresh_volume_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".DS_Store").write_text("")
    Replica.open(tmp_path).close()
    Replica.open(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplicaError) as caught:
        Replica.open(tmp_path / "file" / "replica")
    assert caught.value.hint


def test_a_replica_can_be_moved(replica: Replica, tmp_path: Path) -> None:
    replica.checkpoint()
    STORY.advance(replica, 1)
    replica.close()
    replica.directory.rename(tmp_path / "moved")
    with Replica.open(tmp_path / "moved") as moved:
        check(moved, 1)
        assert loaded(moved.directory / "current") == STORY.bits[0]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "journal"])
def test_a_fifo_in_the_work_directory_drops_the_replica_at_once(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "replica"
    with Replica.open(directory, threads=1) as replica:
        STORY.build(replica)
    path = (directory / "work").resolve() / name
    if name == "journal":
        path = path / STORY.at(1).record
    with fifo_at(path):
        again = in_time(lambda: Replica.open(directory, threads=1))
        with again:
            assert again.position is None
            assert "not a regular file" in again.trouble
            STORY.build(again)
            check(again, 0)


def test_a_fifo_in_place_of_the_lock_is_an_error_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "replica"
    with Replica.open(directory, threads=1):
        pass
    (lock,) = [path for path in directory.iterdir() if path.is_file() and "lock" in path.name]
    with fifo_at(lock):
        assert isinstance(in_time(lambda: Replica.open(directory, threads=1)), ReplicaError)
