"""Lost data: a follower serves the newest version that can be rebuilt, warns, and recovers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.clocked_bucket import finish_background
from support.damage import HARMS, cut, flip, put_back, remove, snapshot
from support.failing_bucket import Troubled, in_memory
from support.followers import NEVER, Arrays, until
from support.small_run import bits_of
from support.special_files import fifo_at, in_time
from weightwire import Follower, Publisher, anchor, digest
from weightwire.chain.reader import read_run
from weightwire.chain.record_paths import commit_path, data_path
from weightwire.chain.records import Commit, DataFile, Shortcut, seal, shortcut_path, unseal
from weightwire.errors import CorruptDelta, DataGone, ReplicaError, Truncated, WeightwireError
from weightwire.telemetry.events import Event


def weights_at(version: int) -> Arrays:
    weights: Arrays = {"w": np.arange(40000, dtype=np.uint16), "b": np.zeros(7, np.float32)}
    weights["w"][: 3 * version] += 1
    weights["b"][0] = version
    return weights


def publish(bucket: Troubled, versions: range, **settings: Any) -> None:
    with Publisher(bucket.inner, on_event=lambda event: None, blocking=True, threads=1, **settings) as publisher:
        for version in versions:
            assert publisher.publish(weights_at(version)).wait() == version
            finish_background(publisher)


@pytest.fixture
def bucket() -> Troubled:
    """Versions 1 (an anchor) to 5."""
    bucket = in_memory()
    bucket.poll_interval = 0.005
    publish(bucket, range(1, 6), anchor_every=NEVER)
    return bucket


@pytest.fixture
def follower(bucket: Troubled, tmp_path: Path, heard: list[Event]) -> Iterator[Follower]:
    with Follower(bucket, into=tmp_path / "replica", threads=1, on_event=heard.append) as follower:
        yield follower


def check(follower: Follower, version: int) -> None:
    """Checks the bits of the replica and of `current`, and the version of `current`."""
    current = follower.replica.directory / "current"
    assert follower.version == version
    assert bits_of(follower.replica.weights) == bits_of(weights_at(version))
    assert json.loads((current / "weightwire.json").read_bytes())["version"] == version


def messages(heard: list[Event], stage: str) -> list[str]:
    return [event.message for event in heard if event.stage == stage]


@pytest.mark.parametrize("harm", HARMS)
class TestDamagedDelta:
    def test_a_fresh_follower_serves_the_version_before_a_damaged_delta(
        self, bucket: Troubled, follower: Follower, harm: Any
    ) -> None:
        harm(bucket.inner, "deltas/5/")
        for _ in range(2):
            with pytest.raises(
                WeightwireError, match="no anchor leads past it; this replica stays at version 4"
            ) as caught:
                follower.once()
            assert "deltas/5/" in caught.value.message
            assert caught.value.hint
            check(follower, 4)

    def test_a_follower_advances_to_the_version_before_a_damaged_delta(
        self, bucket: Troubled, follower: Follower, harm: Any
    ) -> None:
        objects = snapshot(bucket.inner)
        remove(bucket.inner, "commits/00000000000000000002")
        for version in (3, 4, 5):
            remove(bucket.inner, f"commits/{version:020}")
        remove(bucket.inner, "HEAD.json")
        assert follower.once() == 1
        put_back(bucket.inner, objects)
        harm(bucket.inner, "deltas/4/")
        with pytest.raises(WeightwireError, match="stays at version 3"):
            follower.once()
        check(follower, 3)

    def test_follower_reports_a_damaged_delta_once_and_recovers(
        self, bucket: Troubled, follower: Follower, heard: list[Event], harm: Any
    ) -> None:
        objects = snapshot(bucket.inner)
        harm(bucket.inner, "deltas/4/")
        follower.start()
        until(lambda: follower.trouble)
        said = follower.trouble
        for _ in range(3):
            asked = len(bucket.asked)
            follower.wake()
            until(lambda asked=asked: bucket.asked[asked:].count(("list", "shortcuts/")))  # type: ignore[misc]
        check(follower, 3)
        assert follower.trouble == said
        [warning] = messages(heard, "warning")
        assert warning.startswith(said)

        put_back(bucket.inner, objects)
        follower.wake()
        until(lambda: follower.version == 5 and not follower.trouble)
        assert messages(heard, "recovered") == [f"recovered: {said}"]

    def test_a_new_publisher_repairs_the_run_for_its_followers(
        self, bucket: Troubled, follower: Follower, harm: Any
    ) -> None:
        harm(bucket.inner, "deltas/4/")
        with pytest.raises(WeightwireError, match="stays at version 3"):
            follower.once()
        publish(bucket, range(7, 9), anchor_every=NEVER)  # 6 is its fence
        assert follower.once() == 8
        check(follower, 8)

    def test_an_anchor_leads_past_a_damaged_delta(
        self, bucket: Troubled, follower: Follower, heard: list[Event], harm: Any
    ) -> None:
        publish(bucket, range(7, 8), anchor_every=1)
        harm(bucket.inner, "deltas/4/")
        harm(bucket.inner, "deltas/7/")
        assert follower.once() == 7
        check(follower, 7)
        assert not messages(heard, "warning")  # the anchor was the cheapest path anyway


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_anchor_is_avoided(bucket: Troubled, follower: Follower, heard: list[Event], harm: Any) -> None:
    publish(bucket, range(7, 8), anchor_every=1)
    harm(bucket.inner, "anchors/7/")
    for _ in range(2):
        assert follower.once() == 7
    check(follower, 7)
    [warning] = messages(heard, "warning")
    assert "anchors/7/" in warning
    assert warning.endswith("; took another path")


def test_the_error_names_the_file_that_blocks(bucket: Troubled, follower: Follower) -> None:
    """It does not name the damaged anchor that was tried before, which can be avoided."""
    publish(bucket, range(7, 9), anchor_every=1)
    for folder in ("anchors/7/", "anchors/8/", "deltas/8/"):
        flip(bucket.inner, folder)
    with pytest.raises(CorruptDelta, match=r"/deltas/8/.*stays at version 7"):
        follower.once()
    check(follower, 7)


def test_a_follower_without_any_complete_version_names_the_file(
    bucket: Troubled, follower: Follower, tmp_path: Path
) -> None:
    remove(bucket.inner, "anchors/")
    with pytest.raises(DataGone, match=r"/anchors/1/.*, and no anchor leads past it\n"):
        follower.once()
    assert follower.version is None
    assert not (tmp_path / "replica" / "current").exists()


def test_a_lost_replica_is_not_rebuilt_at_an_older_version(
    bucket: Troubled, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It served version 5 and never goes back."""
    assert follower.once() == 5
    publish(bucket, range(7, 8), anchor_every=NEVER)

    def fail(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise MemoryError("half of it")

    monkeypatch.setattr("weightwire.replica.workdir.write_absolute", fail)
    with pytest.raises(ReplicaError):
        follower.once()
    assert follower.replica.position is None
    cut(bucket.inner, "deltas/5/")
    with pytest.raises(Truncated, match=r"/deltas/5/.*no anchor leads past it\n"):
        follower.once()
    assert follower.version is None
    assert bits_of(follower.replica.directory / "current") == bits_of(weights_at(5))


def add_anchor(bucket: Troubled, version: int, weights: Arrays, after: str) -> None:
    """Adds a foreign shortcut that claims that these weights have this state."""
    data = anchor(weights).to_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    file = DataFile(data_path("anchor", version, 1, 0, sha256), len(data), sha256, 0)
    run = asyncio.run(read_run(bucket.inner)).run
    shortcut = seal(Shortcut(run=run, version=version, kind="anchor", after=after, files=(file,)))
    put_back(bucket.inner, {file.path: data, shortcut_path(shortcut): shortcut.data})


def test_an_anchor_with_other_weights_is_avoided(bucket: Troubled, follower: Follower, heard: list[Event]) -> None:
    """Its bytes match its record, but do not give the state of the version."""
    add_anchor(bucket, 5, weights_at(9), digest(weights_at(5)).hex)
    assert follower.once() == 5
    check(follower, 5)
    [warning] = messages(heard, "warning")
    assert warning.endswith("took another path")


def test_a_delta_to_another_state_is_avoided(bucket: Troubled, follower: Follower, heard: list[Event]) -> None:
    """The commit has the state of an anchor, but its own delta gives another state."""
    path = commit_path(5)
    commit = unseal(asyncio.run(bucket.inner.get(path)), Commit, "").record
    remove(bucket.inner, path)
    remove(bucket.inner, "HEAD.json")
    assert follower.once() == 4
    other = msgspec.structs.replace(commit, after=digest(weights_at(9)).hex)
    put_back(bucket.inner, {path: seal(other).data})
    with pytest.raises(CorruptDelta, match=r"/deltas/5/.*stays at version 4"):
        follower.once()
    check(follower, 4)
    add_anchor(bucket, 5, weights_at(9), other.after)
    assert follower.once() == 5
    assert bits_of(follower.replica.weights) == bits_of(weights_at(9))
    assert len(messages(heard, "warning")) == 1


def test_a_fifo_in_place_of_a_delta_blocks_nobody(tmp_path: Path, heard: list[Event]) -> None:
    """The follower serves the version before it, and recovers when the file is back."""
    root = tmp_path / "bucket"
    with Publisher(root, on_event=lambda event: None, blocking=True, threads=1, anchor_every=NEVER) as publisher:
        for version in range(1, 4):
            publisher.publish(weights_at(version)).wait()
    (delta,) = (root / "deltas" / "3").iterdir()
    with Follower(str(root), into=tmp_path / "replica", threads=1, on_event=heard.append) as follower:
        with fifo_at(delta):
            problem = in_time(follower.once)
            assert isinstance(problem, DataGone)
            assert "deltas/3/" in problem.message
            assert "not a regular file" in problem.message
            assert problem.hint
            check(follower, 2)
        in_time(follower.once)
        check(follower, 3)
