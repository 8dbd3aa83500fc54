"""Weights changed in place: the journal, what a crash leaves, and damage of any kind."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.replicas import STORY, check, reopened
from weightwire import Delta, Tensor
from weightwire.delta.absolute import write_absolute
from weightwire.errors import ReplicaError, WeightwireError
from weightwire.replica.replica import Replica
from weightwire.system import durable_files

pytestmark = pytest.mark.usefixtures("without_fsync")


def test_a_write_that_ends_half_way_is_repaired_on_open(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_write_over_a_file_that_was_changed_is_noticed(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_sync_empties_the_journal(replica: Replica) -> None:
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


def test_records_older_than_the_last_sync_are_skipped(replica: Replica) -> None:
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


def test_a_missing_record_in_between_is_noticed(replica: Replica) -> None:
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
