"""Weights changed in place: the journal, crashes and damage."""

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
from weightwire.delta.absolute import make_absolute, write_absolute
from weightwire.errors import ReplicaError, WeightwireError, WrongBase
from weightwire.replica.replica import Replica
from weightwire.system import durable_files

pytestmark = pytest.mark.usefixtures("without_fsync")


def test_a_failed_write_is_repaired_on_open(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(weights: dict[str, Tensor], patch: Delta, **_: object) -> None:
        write_absolute(weights, replace(patch, stacks=(patch.stack_of["embed"],)))
        raise MemoryError("no more")

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", torn)
    with pytest.raises(ReplicaError, match="failed halfway") as caught:
        STORY.advance(replica, 1)
    monkeypatch.undo()
    assert caught.value.hint
    assert replica.position is None
    assert not replica.weights
    with reopened(replica) as again:
        check(again, 1)


def test_a_concurrent_change_of_the_file_is_noticed(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes to the file between decoding and writing."""

    def spoilt(weights: dict[str, Tensor], patch: Delta, **_: object) -> Any:
        weights["embed"].bits[:] = 0
        return write_absolute(weights, patch)

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", spoilt)
    with pytest.raises(ReplicaError, match="did not have the expected digest"):
        STORY.advance(replica, 1)
    assert replica.position is None
    monkeypatch.undo()
    with reopened(replica) as again:
        assert again.position is None
        assert again.trouble


def test_a_patch_for_another_state_is_refused_before_anything_is_written(replica: Replica) -> None:
    work = replica._held()
    patch = make_absolute(work.weights, STORY.deltas(1), work.state)
    with pytest.raises(WrongBase, match="made for weights with state"):
        work.advance(replace(patch, before="0" * 64), STORY.at(1))
    assert replica.journal_bytes == 0
    check(replica, 0)
    replica.verify()


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
    """After a crash between sync and removal, old records must not overwrite a newer state."""
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


def test_a_failed_sync_loses_only_the_memory(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    STORY.advance(replica, 1)
    monkeypatch.setattr(durable_files, "flush", failing)
    with pytest.raises(ReplicaError, match="could not be written to disk"):
        replica.sync()
    monkeypatch.undo()
    assert replica.position is None
    assert not replica.weights
    assert replica.trouble
    with pytest.raises(ReplicaError, match="could not be written to disk"):
        STORY.advance(replica, 2)
    with reopened(replica) as again:
        check(again, 1)
        STORY.advance(again, 2)


def damage(replica: Replica, name: str, change: Callable[[bytes], bytes]) -> Replica:
    """Damages one file of a closed replica at version 2."""
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
        ("state.json", lambda data: data[:50], r"state\.json: cannot be read \(Input data was truncated"),
        ("state.json", lambda data: b"[]", "Expected `object`, got `array`"),
        ("state.json", lambda data: b"{}", "missing required field `run`"),
        ("state.json", lambda data: b'{"more":' + b"[" * 5000, "recursion|truncated"),
        ("state.json", lambda data: b"\xff" + data, r"state\.json: cannot be read"),
        ("state.json", lambda data: data.replace(b'"digests": "', b'"digests": "x'), "non-hexadecimal"),
        ("state.json", lambda data: data.replace(b'"digests": "', b'"digests": "00'), "does not match model"),
        ("state.json", lambda data: re.sub(rb'("digests": ")[0-9a-f]{8}', rb"\g<1>01234567", data), "its digests and"),
        (
            "state.json",
            lambda data: data.replace(b'"digests": "', b'"digests": 7, "_": "'),
            "Expected `str`, got `int`",
        ),
        ("state.json", lambda data: data.replace(b'"run": "run"', b'"run": {}'), "Expected `str`, got `object`"),
        ("state.json", lambda data: data.replace(b'"version": 1', b'"version": "?"'), "Expected `int`, got `str`"),
        ("state.json", lambda data: data.replace(b'"version": 1', b'"version": -1'), "is not a valid position"),
        ("journal/*.safetensors", lambda data: data[:-1], "version|00002"),
        ("journal/*.safetensors", lambda data: b"", "is empty"),
        ("journal/*.safetensors", flipped, "tensor|00002"),
    ],
)
def test_damage_to_a_replica_is_named(replica: Replica, name: str, change: Callable[[bytes], bytes], why: str) -> None:
    with damage(replica, name, change) as again:
        assert again.position is None
        assert not again.weights
        assert again.trouble
        assert "damaged and has been dropped" in again.trouble
        assert re.search(why, again.trouble)
        assert os.listdir(again.directory / "works") == []
        STORY.build(again, 3)
        check(again, 3)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "journal"])
def test_a_missing_file_of_a_replica_is_named(replica: Replica, name: str) -> None:
    work = (replica.directory / "work").resolve()
    (work / name).rename(work / "elsewhere")
    with reopened(replica) as again:
        assert again.position is None
        assert again.trouble
        assert name in again.trouble


def test_a_missing_journal_record_is_noticed(replica: Replica) -> None:
    for version in (1, 2, 3):
        STORY.advance(replica, version)
    (replica.directory / "work" / "journal" / STORY.at(2).record).unlink()
    with reopened(replica) as again:
        assert again.position is None
        assert again.trouble
        assert "made for weights with state" in again.trouble


def test_bit_rot_in_memory_is_found(replica: Replica) -> None:
    replica.verify()
    with (replica.directory / "work" / "model.safetensors").open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(ReplicaError, match="does not have its digest of version 0"):
        replica.verify()
    assert replica.position is None
    assert replica.trouble
    STORY.build(replica, 2)
    check(replica, 2)


def test_a_delta_to_rotten_weights_is_refused(replica: Replica) -> None:
    """The delta is valid, but the weights under it are not."""
    with (replica.directory / "work" / "model.safetensors").open("r+b") as file:
        file.seek(STORY.schema["embed"][1][0] * -64, os.SEEK_END)
        file.write(bytes(64 * 50))
    with pytest.raises(WeightwireError):
        STORY.advance(replica, 1)
    assert replica.journal_bytes == 0
