"""The name in a replica: it survives restarts and a rename, and a copy takes another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.clocked_bucket import first_weights, publish
from weightwire import Event, Follower
from weightwire.bucket.registry import open_bucket
from weightwire.chain import is_replica_name
from weightwire.follower import own_name as module
from weightwire.follower.own_name import Place, own_name


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    (tmp_path / "replica").mkdir()
    return tmp_path / "replica"


def name_of(directory: Path) -> tuple[str, list[str]]:
    """The name, and the warnings."""
    warnings: list[str] = []
    return own_name(directory, warnings.append), warnings


def test_name_survives_a_restart(replica: Path) -> None:
    name, warnings = name_of(replica)
    assert is_replica_name(name)
    assert name_of(replica) == (name, [])
    assert warnings == []


def test_copied_replica_takes_a_new_name_and_keeps_it(replica: Path, tmp_path: Path) -> None:
    name, _ = name_of(replica)
    copy = Path(shutil.copytree(replica, tmp_path / "copy"))
    new, [warned] = name_of(copy)
    assert new != name
    assert warned == f"{copy} is a copy of the replica {name}, so its name is now {new}"
    assert name_of(copy) == (new, [])
    assert name_of(replica) == (name, [])


def test_renamed_replica_keeps_its_name(replica: Path, tmp_path: Path) -> None:
    name, _ = name_of(replica)
    moved = replica.rename(tmp_path / "moved")
    assert name_of(moved) == (name, [])


def test_replica_on_another_machine_takes_a_new_name(replica: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = name_of(replica)
    monkeypatch.setattr(module, "_machine", lambda: "another")
    new, [warned] = name_of(replica)
    assert new != name
    assert "is a copy" in warned


def test_replica_of_an_earlier_release_keeps_its_name(replica: Path, tmp_path: Path) -> None:
    (replica / "name").write_text("old-name\n")
    assert name_of(replica) == ("old-name", [])
    assert name_of(Path(shutil.copytree(replica, tmp_path / "copy")))[0] != "old-name"


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"machine": 1', b"\xff"])
def test_damaged_place_is_written_again(replica: Path, damage: bytes) -> None:
    name, _ = name_of(replica)
    whole = (replica / "name.place").read_bytes()
    (replica / "name.place").write_bytes(damage)
    assert name_of(replica) == (name, [])
    assert (replica / "name.place").read_bytes() == whole


def test_damaged_name_is_replaced(replica: Path) -> None:
    name_of(replica)
    (replica / "name").write_bytes(b"\xff")
    name, warnings = name_of(replica)
    assert is_replica_name(name)
    assert warnings == []


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (Place("m", 7, 1, "/elsewhere"), True),  # renamed
        (Place("m", 7, 2, "/here"), True),  # after a reboot
        (Place("m", 7, 2, "/elsewhere"), False),  # the root of another volume
        (Place("m", 8, 1, "/here"), False),  # replaced by a copy
        (Place("n", 7, 1, "/here"), False),
    ],
)
def test_place_is_the_same_directory_on_the_same_machine(other: Place, same: bool) -> None:
    assert Place("m", 7, 1, "/here").is_same(other) is same


def test_followers_of_a_replica_and_its_copy_have_two_heartbeats(tmp_path: Path) -> None:
    publish(open_bucket(tmp_path / "run"), first_weights(), 1)
    with Follower(tmp_path / "run", into=tmp_path / "one") as follower:
        follower.once()
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    events: list[Event] = []
    with (
        Follower(tmp_path / "run", into=tmp_path / "one", on_event=events.append) as one,
        Follower(tmp_path / "run", into=tmp_path / "two", on_event=events.append) as two,
    ):
        one.once()
        two.once()
        assert len(list((tmp_path / "run" / "replicas").iterdir())) == 2
    [warned] = [event.message for event in events if event.stage == "warning"]
    assert "is a copy of the replica" in warned
