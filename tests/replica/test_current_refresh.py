"""A `current` that is made while the replica advances."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from support.replicas import STORY, check, checkpoints, loaded, reopened
from weightwire.errors import ReplicaError
from weightwire.replica.current_refresh import CurrentRefresh
from weightwire.replica.replica import Replica
from weightwire.system.durable_files import clone_file

pytestmark = pytest.mark.usefixtures("without_fsync")


def shown(replica: Replica) -> int:
    """The version of `current`, which must hold its bits."""
    current = replica.directory / "current"
    version: int = json.loads((current / "weightwire.json").read_bytes())["version"]
    assert loaded(current) == STORY.bits[version]
    return version


def begun(replica: Replica) -> CurrentRefresh:
    """A refresh to version 2; `current` is at version 1."""
    STORY.advance(replica, 1)
    replica.make_current()
    STORY.advance(replica, 2)
    refresh = replica.begin_refresh()
    assert refresh is not None
    return refresh


def records(replica: Replica) -> list[int]:
    return sorted(int(path.name[:20]) for path in (replica.directory / "work/journal").iterdir())


def test_versions_arrive_while_current_is_made(replica: Replica) -> None:
    refresh = begun(replica)
    STORY.advance(replica, 3)
    refresh.make_beside()
    STORY.advance(replica, 4)
    assert shown(replica) == 1
    replica.finish_refresh(refresh)
    assert shown(replica) == 2
    assert checkpoints(replica) == [2]
    assert records(replica) == [3, 4]
    check(replica, 4)
    with reopened(replica) as again:
        check(again, 4)
        assert shown(again) == 2


def test_side_files_are_those_of_the_last_checkpoint(replica: Replica) -> None:
    refresh = begun(replica)
    before = {path.name: path.read_bytes() for path in (replica.directory / "current").iterdir() if path.is_file()}
    refresh.make_beside()
    replica.finish_refresh(refresh)
    after = {path.name: path.read_bytes() for path in (replica.directory / "current").iterdir() if path.is_file()}
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert changed == {"model.safetensors", "weightwire.json"}


def test_several_refreshes_follow_each_other(replica: Replica) -> None:
    refresh = begun(replica)
    for version in (3, 4, 5):
        STORY.advance(replica, version)
        refresh.make_beside()
        replica.finish_refresh(refresh)
        assert shown(replica) == version - 1
        following = replica.begin_refresh()
        assert following is not None
        refresh = following
    assert records(replica) == [5]


def test_current_that_was_made_meanwhile_stays(replica: Replica) -> None:
    refresh = begun(replica)
    refresh.make_beside()
    STORY.advance(replica, 3)
    replica.make_current()
    STORY.advance(replica, 4)
    replica.finish_refresh(refresh)
    assert (shown(replica), checkpoints(replica), records(replica)) == (3, [3], [4])
    with reopened(replica) as again:
        check(again, 4)


def test_a_sync_meanwhile_is_not_undone(replica: Replica) -> None:
    """state.json must not name an older version than the journal begins with."""
    refresh = begun(replica)
    refresh.make_beside()
    STORY.advance(replica, 3)
    replica.sync()
    STORY.advance(replica, 4)
    replica.finish_refresh(refresh)
    assert records(replica) == [4]
    with reopened(replica) as again:
        check(again, 4)


def test_a_rebuilt_replica_drops_what_was_made(replica: Replica) -> None:
    refresh = begun(replica)
    refresh.make_beside()
    STORY.build(replica, 5)
    replica.finish_refresh(refresh)
    assert (shown(replica), checkpoints(replica)) == (1, [1])
    assert replica.begin_refresh() is None  # the journal does not lead from version 1 to 5
    check(replica, 5)


def test_without_a_checkpoint_there_is_nothing_to_begin_with(replica: Replica) -> None:
    STORY.advance(replica, 1)
    assert replica.begin_refresh() is None


def test_a_damaged_checkpoint_is_not_built_on(replica: Replica) -> None:
    refresh = begun(replica)
    model = (replica.directory / "current").resolve() / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    model.write_bytes(data)
    with pytest.raises(ReplicaError, match="was damaged"):
        refresh.make_beside()
    assert not refresh.made.exists()
    replica.finish_refresh(refresh, is_made=False)
    assert records(replica) == []
    STORY.advance(replica, 3)
    assert replica.begin_refresh() is None
    replica.make_current()
    assert shown(replica) == 3


def test_a_checkpoint_that_is_being_made_is_kept_when_others_are_given_back(replica: Replica) -> None:
    refresh = begun(replica)
    lent = replica.directory / "current"
    borrowed = replica._checkpoints.lend()
    refresh.make_beside()
    replica.give_back(borrowed)
    assert refresh.made.exists()
    replica.finish_refresh(refresh)
    assert shown(replica) == 2
    assert lent.exists()


def fail(*_: object) -> None:
    raise OSError(5, os.strerror(5))


def test_a_failed_flush_loses_the_memory_at_once(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have dropped pages, so nothing may be copied from the memory until the refresh is finished."""
    refresh = begun(replica)
    with monkeypatch.context() as patched:
        patched.setattr("weightwire.system.durable_files.flush", fail)
        with pytest.raises(ReplicaError, match="could not be written to disk"):
            refresh.make_beside()
    assert replica.position is None
    with pytest.raises(ReplicaError, match="could not be written to disk"):
        replica.make_current()
    replica.finish_refresh(refresh, is_made=False)
    assert shown(replica) == 1
    with reopened(replica) as again:
        check(again, 2)


def test_a_flush_that_fails_during_a_copy_spoils_the_copy(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    refresh = begun(replica)

    def copy_meanwhile(source: Path, target: Path) -> bool:
        with monkeypatch.context() as patched:
            patched.setattr("weightwire.system.durable_files.flush", fail)
            with pytest.raises(ReplicaError):
                refresh.make_beside()
        return clone_file(source, target)

    monkeypatch.setattr("weightwire.replica.checkpoint_store.durable_files.clone_file", copy_meanwhile)
    with pytest.raises(ReplicaError, match="could not be written to disk"):
        replica.make_current()
    assert shown(replica) == 1


def test_current_is_never_a_mixture_while_versions_arrive(replica: Replica) -> None:
    """Advances as fast as it can while another thread renews `current`."""
    STORY.advance(replica, 1)
    replica.make_current()
    refresh = begun_at = None
    worker: threading.Thread | None = None
    seen = set()
    for version in range(2, STORY.last + 1):
        STORY.advance(replica, version)
        if worker is None:
            refresh, begun_at = replica.begin_refresh(), version
            assert refresh is not None
            worker = threading.Thread(target=refresh.make_beside)
            worker.start()
        elif not worker.is_alive() or version % 3 == 0:
            worker.join()
            assert refresh is not None
            replica.finish_refresh(refresh)
            assert shown(replica) == begun_at
            seen.add(begun_at)
            worker = None
    if worker is not None:
        worker.join()
    assert seen
    check(replica, STORY.last)


def test_a_leftover_of_a_crash_is_removed(replica: Replica) -> None:
    refresh = begun(replica)
    refresh.make_beside()
    made: Path = refresh.made
    with reopened(replica) as again:
        assert not made.exists()
        assert shown(again) == 1
        check(again, 2)
        after = again.begin_refresh()
        assert after is not None
        after.make_beside()
        again.finish_refresh(after)
        assert shown(again) == 2
