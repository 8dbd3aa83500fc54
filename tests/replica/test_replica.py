"""The replica: one version at a time, and nothing else, whatever is done to it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.story import FILES, SHAPES, Story, bits_of
from weightwire import CorruptDelta, Delta, Tensor, WrongBase, anchor, diff, digest, patch
from weightwire.delta.absolute import write_absolute
from weightwire.errors import ForeignRun, ReplicaError, SchemaChanged, WeightwireError
from weightwire.replica.replica import Replica
from weightwire.replica.workdir import Position
from weightwire.system import durable_files
from weightwire.weights.dtypes import DTYPES

STORY = Story()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here: see test_replica_crash.py for that."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    """At version 0."""
    with Replica.open(tmp_path / "replica", threads=1) as opened:
        STORY.build(opened)
        yield opened


def check(replica: Replica, version: int, story: Story = STORY) -> None:
    """That a replica is at a version, bit for bit."""
    assert replica.position == story.at(version)
    assert replica.state == story.states[version]
    assert bits_of(replica.weights) == story.bits[version]
    assert replica.trouble is None


def loaded(directory: Path) -> dict[str, bytes]:
    """The weights of a checkpoint, by the stock library."""
    with safetensors.safe_open(directory / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    return {
        name: data["data"] for name, data in safetensors.deserialize((directory / "model.safetensors").read_bytes())
    }


def reopened(replica: Replica) -> Replica:
    replica.close()
    return Replica.open(replica.directory, threads=1)


# From nothing


def test_an_empty_replica(tmp_path: Path) -> None:
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


def test_a_rebuild_takes_its_place_at_once(replica: Replica) -> None:
    check(replica, 0)
    with reopened(replica) as again:
        check(again, 0)
        assert again.journal_bytes == 0


def test_a_rebuild_is_invisible_until_it_is_finished(replica: Replica) -> None:
    before = sorted(os.listdir(replica.directory / "works"))
    with replica.rebuild(STORY.schema) as new:
        assert set(new) == set(SHAPES)
        assert len(new) == len(SHAPES)
        assert not any(new[name].bits.any() for name in new)
        new["embed"].bits[:] = 1
        check(replica, 0)
    check(replica, 0)
    assert sorted(os.listdir(replica.directory / "works")) == before
    with pytest.raises(ZeroDivisionError), replica.rebuild(STORY.schema) as new:
        raise ZeroDivisionError
    assert sorted(os.listdir(replica.directory / "works")) == before


def test_a_rebuild_over_a_replica_with_a_journal(replica: Replica) -> None:
    other = Story(run="other", seed=7)
    STORY.advance(replica, 1)
    STORY.advance(replica, 2)
    other.build(replica, 1)
    check(replica, 1, other)
    assert replica.journal_bytes == 0
    with reopened(replica) as again:
        check(again, 1, other)


def test_a_rebuild_that_is_not_what_it_says(replica: Replica) -> None:
    with replica.rebuild(STORY.schema) as new, pytest.raises(ReplicaError, match="'embed' was not filled in"):
        new.finish(STORY.at(1), STORY.states[1])
    check(replica, 0)


def test_a_rebuild_is_finished_once(replica: Replica) -> None:
    with replica.rebuild(STORY.schema) as new:
        for name in new:
            new[name].bits[:] = STORY.versions[3][name].bits
        new.finish(STORY.at(3), STORY.states[3])
        check(replica, 3)
        with pytest.raises(ValueError, match="finished once"):
            new.finish(STORY.at(3), STORY.states[3])
    with pytest.raises(ValueError, match="inside its block"):
        new.finish(STORY.at(3), STORY.states[3])
    check(replica, 3)


def test_a_rebuild_has_real_blocks(replica: Replica) -> None:
    """A sparse file would be a SIGBUS on the day the disk is full."""
    with replica.rebuild({"x": (DTYPES["U8"], (10_000_000,))}):
        (staged,) = (replica.directory / "works").glob(".*.partial")
        assert (staged / "model.safetensors").stat().st_blocks * 512 >= 10_000_000


# Forward


@pytest.mark.parametrize("threads", [1, 3])
def test_version_after_version(tmp_path: Path, threads: int) -> None:
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
    assert made.entries["norm"].fresh  # all of it changed: positions would take as much again
    held = {name: Tensor(t.dtype, t.shape, t.bits.copy()) for name, t in STORY.versions[0].items()}
    patch(held, made)
    assert bits_of(held) == STORY.bits[1]
    write_absolute(held, made)
    assert bits_of(held) == STORY.bits[1]
    assert made.advance(STORY.states[0]) == STORY.states[1]


def test_a_version_that_changes_nothing(replica: Replica) -> None:
    made = replica.advance([], STORY.at(1), STORY.states[0].hex)
    assert not made.entries
    assert made.before == made.after == STORY.states[0].hex
    assert replica.position == STORY.at(1)
    with reopened(replica) as again:
        assert again.position == STORY.at(1)
        assert bits_of(again.weights) == STORY.bits[0]


def test_a_shortcut_over_several_versions(replica: Replica) -> None:
    replica.advance([diff(STORY.versions[0], STORY.versions[4])], STORY.at(4), STORY.states[4].hex)
    check(replica, 4)
    with reopened(replica) as again:
        check(again, 4)


def test_an_anchor_as_a_step(replica: Replica) -> None:
    made = replica.advance([anchor(STORY.versions[3])], STORY.at(3), STORY.states[3].hex)
    assert made.before == STORY.states[0].hex
    check(replica, 3)
    with reopened(replica) as again:
        check(again, 3)


def test_the_weights_are_read_only(replica: Replica) -> None:
    with pytest.raises(ValueError, match="read-only"):
        replica.weights["embed"].bits[0] = 1


def test_merged_patches(replica: Replica) -> None:
    patches = [STORY.advance(replica, version) for version in range(1, 6)]
    merged = replica.merge(patches[1:])
    assert (merged.before, merged.after) == (STORY.states[1].hex, STORY.states[5].hex)
    held = {name: Tensor(t.dtype, t.shape, t.bits.copy()) for name, t in STORY.versions[1].items()}
    patch(held, merged)
    assert bits_of(held) == STORY.bits[5]
    assert not replica.merge([]).entries
    assert replica.merge(patches[4:]) is patches[4]
    with pytest.raises(WrongBase, match="the weights are at"):
        replica.merge(patches[:2])
    with pytest.raises(WrongBase, match="does not follow"):
        replica.merge([patches[0], patches[4]])


# What does not fit


def test_a_delta_for_other_weights(replica: Replica) -> None:
    with pytest.raises(WrongBase, match="was made for weights with state"):
        replica.advance(STORY.deltas(2), STORY.at(2), STORY.states[2].hex)
    check(replica, 0)
    assert replica.journal_bytes == 0


@pytest.mark.parametrize("name", ["embed", "norm"])
def test_a_damaged_delta(replica: Replica, name: str) -> None:
    delta = STORY.deltas(1)[0]
    data = bytearray(delta.to_bytes())
    data[delta.byte_range(name)[1] - 3] ^= 0x10
    with pytest.raises(CorruptDelta):
        replica.advance([Delta.from_bytes(bytes(data))], STORY.at(1), STORY.states[1].hex)
    check(replica, 0)
    assert not list((replica.directory / "work" / "journal").iterdir())
    STORY.advance(replica, 1)
    check(replica, 1)


def test_a_delta_that_leads_elsewhere(replica: Replica) -> None:
    """The file is in order, but not what the commit speaks of."""
    with pytest.raises(CorruptDelta, match="the result has state"):
        replica.advance(STORY.deltas(1), STORY.at(1), STORY.states[2].hex)
    with pytest.raises(CorruptDelta, match="a version without files"):
        replica.advance([], STORY.at(1), STORY.states[1].hex)
    check(replica, 0)


def test_another_run(replica: Replica) -> None:
    with pytest.raises(ForeignRun, match="holds run run, not other"):
        replica.advance([], Position("other", 1, "0" * 64), STORY.states[0].hex)


def test_an_older_version(replica: Replica) -> None:
    with pytest.raises(ReplicaError, match="is at version 0, and 0 is not after it"):
        replica.advance([], STORY.at(0), STORY.states[0].hex)


def test_other_tensors(replica: Replica) -> None:
    old = STORY.versions[0]
    for new in ({**old, "more": np.zeros(3)}, {name: old[name] for name in old if name != "norm"}):
        with pytest.raises(SchemaChanged, match="is added, removed or reshaped"):
            replica.advance([diff(old, new)], STORY.at(1), digest(new).hex)
    check(replica, 0)


@pytest.mark.parametrize("commit", ["", "0" * 63, "../../../etc/passwd", "G" * 64])
def test_a_commit_that_is_none(commit: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        Position("run", 1, commit)


# Interrupted


def test_an_interrupt_before_anything_is_written(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weightwire.replica.replica.make_absolute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        STORY.advance(replica, 1)
    monkeypatch.undo()
    check(replica, 0)
    STORY.advance(replica, 1)
    check(replica, 1)


def test_an_interrupt_comes_out_afterwards(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the journal has happened."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)  # for the main thread to hear of it
        return write_absolute(*args, **kwargs)

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        STORY.advance(replica, 1)
    check(replica, 1)


def test_a_write_that_ends_half_way(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(weights: dict[str, Tensor], patch: Delta, **_: object) -> None:
        write_absolute(weights, replace(patch, entries={"embed": patch.entries["embed"]}))
        raise MemoryError("no more")

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", torn)
    with pytest.raises(ReplicaError, match="ended half-way") as caught:
        STORY.advance(replica, 1)
    monkeypatch.undo()
    assert caught.value.hint
    assert replica.position is None
    assert not replica.weights
    with reopened(replica) as again:
        check(again, 1)


def test_a_write_over_something_else(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between decoding and writing someone wrote to the file."""

    def spoilt(weights: dict[str, Tensor], patch: Delta, **_: object) -> Any:
        weights["embed"].bits[:] = 0
        return write_absolute(weights, patch)

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", spoilt)
    with pytest.raises(ReplicaError, match="did not hold what it should"):
        STORY.advance(replica, 1)
    assert replica.position is None
    monkeypatch.undo()
    with reopened(replica) as again:
        assert again.position is None
        assert again.trouble


# Sync


def test_a_sync_does_away_with_the_journal(replica: Replica) -> None:
    STORY.advance(replica, 1)
    STORY.advance(replica, 2)
    journal = replica.directory / "work" / "journal"
    assert [path.name[:20].lstrip("0") for path in sorted(journal.iterdir())] == ["1", "2"]
    assert replica.journal_bytes == sum(path.stat().st_size for path in journal.iterdir())
    replica.sync()
    assert not list(journal.iterdir())
    assert replica.journal_bytes == 0
    state = json.loads((replica.directory / "work" / "state.json").read_bytes())
    assert (state["version"], state["state"]) == (2, STORY.states[2].hex)
    with reopened(replica) as again:
        check(again, 2)


def test_what_a_sync_made_superfluous_is_skipped(replica: Replica) -> None:
    """A crash between the two: older records must not be written over a newer state."""
    STORY.advance(replica, 1)
    journal = replica.directory / "work" / "journal"
    kept = {path.name: path.read_bytes() for path in journal.iterdir()}
    STORY.advance(replica, 2)
    replica.sync()
    for name, data in kept.items():
        (journal / name).write_bytes(data)
    with reopened(replica) as again:
        check(again, 2)
        assert not list(journal.iterdir())


def test_a_sync_that_fails_loses_what_is_in_memory_only(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    STORY.advance(replica, 1)
    monkeypatch.setattr(durable_files, "flush", failing)
    with pytest.raises(ReplicaError, match="could not be brought to disk"):
        replica.sync()
    monkeypatch.undo()
    assert replica.position is None
    assert not replica.weights
    assert replica.trouble
    with pytest.raises(ReplicaError, match="could not be brought to disk"):
        STORY.advance(replica, 2)
    with reopened(replica) as again:
        check(again, 1)
        STORY.advance(again, 2)


# Checkpoints


def test_a_checkpoint(replica: Replica) -> None:
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
        assert file.get_tensor("norm").tobytes() == STORY.bits[0]["norm"]  # who has it open keeps it
    assert os.listdir(replica.directory / "checkpoints") == [second.name]


def checkpoints(replica: Replica) -> list[int]:
    """The versions of which there is a directory."""
    return sorted(int(path.name.split("-")[0]) for path in (replica.directory / "checkpoints").iterdir())


def test_a_checkpoint_that_was_handed_out_stays_until_the_next_one_is(replica: Replica) -> None:
    first = replica.checkpoint()
    for version in (1, 2, 3):
        STORY.advance(replica, version)
        replica.make_current()
        assert loaded(first) == STORY.bits[0]
        assert checkpoints(replica) == [0, version]
    assert loaded(replica.checkpoint()) == STORY.bits[3]
    assert checkpoints(replica) == [3]


def test_a_checkpoint_that_is_lent_stays_until_all_have_given_it_back(replica: Replica) -> None:
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


def test_a_checkpoint_that_was_handed_out_goes_when_the_replica_is_opened_again(replica: Replica) -> None:
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


def test_a_checkpoint_that_someone_removed(replica: Replica) -> None:
    made = replica.checkpoint()
    (made / "model.safetensors").unlink()
    assert loaded(replica.checkpoint()) == STORY.bits[0]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", ".", "a\0"])
def test_side_files_that_lead_out(replica: Replica, name: str) -> None:
    with pytest.raises(ReplicaError, match="cannot be the name of a side file"):
        replica.rebuild(STORY.schema, {name: b""})


def test_side_files_that_would_contradict_the_weights(tmp_path: Path) -> None:
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


def test_blocks_that_are_shared_need_room(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system shares blocks, the first write to a page takes a new one: without room a SIGBUS."""
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


# Damage


def damage(replica: Replica, name: str, change: Callable[[bytes], bytes]) -> Replica:
    """A replica at version 2, of which one file is changed while it is closed."""
    STORY.advance(replica, 1)
    replica.sync()
    STORY.advance(replica, 2)
    replica.close()
    (path,) = (replica.directory / "work").glob(name)
    path.write_bytes(change(path.read_bytes()))
    return Replica.open(replica.directory)


def flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("model.safetensors", flipped, "tensor '"),
        ("model.safetensors", lambda data: data[:-1], "model.safetensors"),
        ("model.safetensors", lambda data: b"", "empty file"),
        ("model.safetensors", lambda data: b"\0" * len(data), "header"),
        ("state.json", lambda data: data[:50], "JSONDecodeError"),
        ("state.json", lambda data: b"[]", "TypeError"),
        ("state.json", lambda data: b"{}", "KeyError"),
        ("state.json", lambda data: data.replace(b'"version": 1', b'"version": "?"'), "ValueError"),
        ("state.json", lambda data: data.replace(b'"steps"', b'"other"'), "KeyError"),
        ("journal/*.safetensors", lambda data: data[:-1], "version|00002"),
        ("journal/*.safetensors", lambda data: b"", "is empty"),
        ("journal/*.safetensors", flipped, "tensor|00002"),
    ],
)
def test_damage_is_named(replica: Replica, name: str, change: Callable[[bytes], bytes], why: str) -> None:
    with damage(replica, name, change) as again:
        assert again.position is None
        assert not again.weights
        assert again.trouble
        assert "damaged, and was dropped" in again.trouble
        assert re.search(why, again.trouble)
        assert os.listdir(again.directory / "works") == []
        STORY.build(again, 3)
        check(again, 3)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "journal"])
def test_what_is_missing_is_named(replica: Replica, name: str) -> None:
    work = (replica.directory / "work").resolve()
    (work / name).rename(work / "elsewhere")
    with reopened(replica) as again:
        assert again.position is None
        assert again.trouble
        assert name in again.trouble


def test_a_record_that_is_missing_in_between(replica: Replica) -> None:
    for version in (1, 2, 3):
        STORY.advance(replica, version)
    (replica.directory / "work" / "journal" / STORY.at(2).record).unlink()
    with reopened(replica) as again:
        assert again.position is None
        assert again.trouble
        assert "was made for weights with state" in again.trouble


def test_bit_rot_in_memory_is_found(replica: Replica) -> None:
    replica.verify()
    with (replica.directory / "work" / "model.safetensors").open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(ReplicaError, match="is not what it was in version 0"):
        replica.verify()
    assert replica.position is None
    assert replica.trouble
    STORY.build(replica, 2)
    check(replica, 2)


def test_bit_rot_does_not_spread(replica: Replica) -> None:
    """The delta is in order; what it was to be applied to is not."""
    with (replica.directory / "work" / "model.safetensors").open("r+b") as file:
        file.seek(STORY.schema["embed"][1][0] * -64, os.SEEK_END)
        file.write(bytes(64 * 50))
    with pytest.raises(WeightwireError):
        STORY.advance(replica, 1)
    assert replica.journal_bytes == 0


# The directory


def test_one_follower_at_a_time(replica: Replica) -> None:
    with pytest.raises(ReplicaError, match="in use by another follower") as caught:
        Replica.open(replica.directory)
    assert caught.value.hint
    STORY.advance(replica, 1)
    check(replica, 1)
    with reopened(replica):
        pass
    replica.close()


def test_a_closed_replica(replica: Replica) -> None:
    replica.close()
    for call in (replica.sync, replica.checkpoint, lambda: replica.rebuild(STORY.schema)):
        with pytest.raises(ReplicaError, match="is closed"):
            call()
    assert replica.position is None


@pytest.mark.parametrize("names", [["notes.txt"], ["checkpoints"], ["lock", "checkpoints"]])
def test_a_directory_with_something_else(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        if name == "checkpoints":
            (tmp_path / name).mkdir()
            (tmp_path / name / "precious").write_text("!")
        else:
            (tmp_path / name).write_text("")
    with pytest.raises(ReplicaError) as caught:
        Replica.open(tmp_path)
    assert caught.value.hint == "name a new directory for the replica"
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert "checkpoints" not in names or (tmp_path / "checkpoints" / "precious").exists()


def test_a_fresh_volume_is_empty_enough(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".DS_Store").write_text("")
    Replica.open(tmp_path).close()
    Replica.open(tmp_path).close()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
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
