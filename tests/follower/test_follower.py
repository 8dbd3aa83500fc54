"""A follower holds the trainer's bits: at once, after a pause, after a restart, in the background."""

from __future__ import annotations

import os
import time
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from support.failing_bucket import Troubled, denied, slow
from support.followers import (
    ALWAYS,
    Trainer,
    beat_in,
    check,
    commit_in,
    current,
    paths,
    settled,
    until,
)
from support.samples import base as bits_for
from weightwire import Follower
from weightwire.errors import (
    NoRun,
    PermissionDenied,
    ReplicaError,
    WeightwireError,
)
from weightwire.follower.wakeups import WakeupServer
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES


class TestOnce:
    def test_once_fills_an_empty_replica(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(4)
        assert (follower.version, follower.head) == (None, -1)
        assert follower.once() == 4
        assert (follower.head, follower.trouble) == (4, "")
        check(follower, trainer.bits, 4)

    def test_repeated_once_applies_each_new_version(self, trainer: Trainer, follower: Follower) -> None:
        for versions in (1, 1, 3, 1):
            version = trainer.publish(versions)
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_once_without_new_versions_emits_no_event(
        self, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
        trainer.publish(2)
        assert follower.once() == 2
        heard.clear()
        assert follower.once() == 2
        assert not heard

    @pytest.mark.parametrize("versions", [30, 70])
    def test_once_catches_up_after_a_pause(self, trainer: Trainer, follower: Follower, versions: int) -> None:
        """Few versions are read one by one. More are planned."""
        trainer.publish()
        follower.once()
        version = trainer.publish(versions)
        assert follower.once() == version
        check(follower, trainer.bits, version)

    def test_once_uses_an_anchor_after_a_long_pause(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, every=50, anchor_every=40)
        trainer.publish()
        follower.once()
        trainer.publish(90)
        trainer.close()
        bucket.asked.clear()
        assert follower.once() == 91
        check(follower, trainer.bits, 91)
        assert bucket.count("read_into", "anchors/81/") == 1
        assert bucket.count("read_into", "deltas/") == 10

    def test_once_joins_a_run_from_its_newest_anchor(self, bucket: Troubled, follower: Follower) -> None:
        trainer = Trainer(bucket.inner, anchor_every=5)
        trainer.publish(14)
        trainer.close()
        assert follower.once() == 14
        check(follower, trainer.bits, 14)
        read = [path.split("/")[:2] for verb, path in bucket.asked if verb == "read_into"]
        assert read == [["anchors", "11"], ["deltas", "12"], ["deltas", "13"], ["deltas", "14"]]

    def test_once_applies_versions_that_change_nothing(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish(2)
        follower.once()
        trainer.publisher.publish(trainer.weights)
        trainer.bits[3] = trainer.bits[2]
        assert follower.once() == 3
        check(follower, trainer.bits, 3)

    def test_once_applies_versions_that_change_everything(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.once()
        for step in range(3):
            trainer.weights["embed"][:] = (
                bits_for(DTYPES["F16"], 51200, seed=step + 5).view(np.float16).reshape(400, 128)
            )
            version = trainer.publish()
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_once_emits_an_event_for_each_stage(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, heard: list[Event]
    ) -> None:
        """Fetching runs ahead of applying, so only some events have a fixed order."""
        trainer.publish()
        follower.once()
        trainer.publish(2)
        follower.once()
        stages_of_versions = [(event.stage, event.version) for event in heard]
        assert [one for one in stages_of_versions if one[0] in ("discover", "apply")] == [
            ("discover", 1),
            ("apply", 1),
            ("discover", 3),
            ("apply", 2),
            ("apply", 3),
        ]
        for version in (1, 2, 3):
            stages = [stage for stage, reached in stages_of_versions if reached == version and stage != "discover"]
            assert stages == ["fetch", "verify", "apply"]
        sizes = {event.nbytes for event in heard if event.version == 2}
        assert sizes == {commit_in(bucket, 2).nbytes}
        assert all(event.at > 1.7e9 for event in heard)

    def test_once_fails_without_a_run(self, follower: Follower, into: Path) -> None:
        with pytest.raises(NoRun, match="nothing has been published there yet") as caught:
            follower.once()
        assert caught.value.hint
        assert not (into / "current").exists()

    def test_once_fails_before_the_first_version(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        """The publisher died after it started the run."""
        bucket.trouble("create", "epochs/", denied)
        trainer.bucket = bucket
        with pytest.raises(PermissionDenied):
            trainer.publish()
        with pytest.raises(NoRun, match="no weights have been published there yet") as caught:
            follower.once()
        assert caught.value.hint == "wait for the publisher"


class TestRestart:
    def test_restarted_follower_continues_at_the_version_held(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
        for life in range(3):
            version = trainer.publish(2)
            bucket.asked.clear()
            with Follower(bucket, into=into) as follower:
                assert follower.once() == version
                check(follower, trainer.bits, version)
            assert bucket.count("read_into", "anchors/") == (0 if life else 1)

    def test_restarted_follower_without_new_versions_keeps_its_version(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
        trainer.publish(2)
        for _ in range(2):
            with Follower(bucket, into=into) as follower:
                assert follower.once() == 2
                check(follower, trainer.bits, 2)

    def test_publisher_restart_adds_a_fence(self, trainer: Trainer, follower: Follower) -> None:
        for _ in range(3):
            trainer.publish(2)
            follower.once()
            version = trainer.restart()
            assert follower.once() == version
            check(follower, trainer.bits, version)

    def test_restarted_follower_keeps_its_name(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        for _ in range(2):
            with Follower(bucket, into=into) as follower:
                follower.once()
        assert len(paths(bucket, "replicas/")) == 1

    @pytest.mark.parametrize("content", [b"", b"../../elsewhere\n", b"\xff", b"two words"])
    def test_restarted_follower_makes_a_new_name_if_the_old_one_was_lost(
        self, bucket: Troubled, trainer: Trainer, into: Path, content: bytes
    ) -> None:
        """A power cut may lose it."""
        trainer.publish()
        with Follower(bucket, into=into) as follower:
            follower.once()
        (into / "name").write_bytes(content)
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 1
        assert len(paths(bucket, "replicas/")) == 2

    def test_restarted_follower_rebuilds_a_damaged_replica(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
        trainer.publish(2)
        with Follower(bucket, into=into) as follower:
            follower.once()
        with (into / "work" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        with Follower(bucket, into=into) as follower:
            assert "damaged" in str(follower.replica.trouble)
            assert current(into) == 2
            assert follower.once() == 2
            check(follower, trainer.bits, 2)


class TestSeveralFollowers:
    def test_several_followers_follow_one_run(self, bucket: Troubled, trainer: Trainer, tmp_path: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=tmp_path / "a", name="a") as a, Follower(bucket, into=tmp_path / "b", name="b") as b:
            assert a.once() == 1
            trainer.publish(2)
            assert b.once() == 3
            check(a, trainer.bits, 1)
            check(b, trainer.bits, 3)
            assert a.once() == 3
            check(a, trainer.bits, 3)
        assert {name: beat_in(bucket, name).version for name in "ab"} == {"a": 3, "b": 3}

    def test_two_followers_cannot_share_a_replica_directory(
        self, bucket: Troubled, trainer: Trainer, follower: Follower, into: Path
    ) -> None:
        trainer.publish()
        follower.once()
        with pytest.raises(ReplicaError, match="in use by another follower") as caught:
            Follower(bucket, into=into)
        assert caught.value.hint == "stop that follower, or use another directory"
        trainer.publish()
        assert follower.once() == 2
        check(follower, trainer.bits, 2)


class TestAddresses:
    def test_a_directory_can_be_followed(self, tmp_path: Path, into: Path) -> None:
        trainer = Trainer(tmp_path / "run")
        trainer.publish(3)
        trainer.close()
        with Follower(tmp_path / "run", into=into) as follower:
            assert follower.once() == 3
            check(follower, trainer.bits, 3)

    def test_a_url_can_be_followed(self, into: Path) -> None:
        url = f"memory://test-{uuid4().hex}/run"
        trainer = Trainer(url)
        trainer.publish(3)
        trainer.close()
        with Follower(url, into=str(into)) as follower:
            assert follower.once() == 3
            check(follower, trainer.bits, 3)

    def test_an_unknown_scheme_is_refused(self, into: Path) -> None:
        with pytest.raises(WeightwireError) as caught:
            Follower("ftp://somewhere", into=into)
        assert caught.value.hint
        assert not into.exists()

    def test_a_replica_in_a_directory_with_other_files_is_refused(self, bucket: Troubled, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(ReplicaError, match="already holds other files") as caught:
            Follower(bucket, into=tmp_path)
        assert caught.value.hint
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


class TestName:
    def test_follower_name_is_in_the_heartbeat(self, bucket: Troubled, trainer: Trainer, into: Path) -> None:
        trainer.publish()
        with Follower(bucket, into=into, name="rollout-7.a_b") as follower:
            follower.once()
        assert paths(bucket, "replicas/") == ["replicas/rollout-7.a_b.json"]

    @pytest.mark.parametrize("name", ["", "../x", "a/b", "two words", ".hidden", "x" * 101])
    def test_malformed_follower_name_is_refused(self, bucket: Troubled, into: Path, name: str) -> None:
        with pytest.raises(ReplicaError, match="not a valid replica name") as caught:
            Follower(bucket, into=into, name=name)
        assert caught.value.hint
        assert not into.exists()


class TestStart:
    def test_started_follower_follows_in_the_background(self, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        follower.start()
        follower.start()
        for version in range(2, 5):
            trainer.publish()
            until(lambda version=version: follower.version == version)  # type: ignore[misc]
        until(lambda: settled(follower, 4))
        check(follower, trainer.bits, 4)
        assert follower.head == 4

    def test_started_follower_still_allows_once(self, bucket: Troubled, trainer: Trainer, follower: Follower) -> None:
        trainer.publish()
        bucket.trouble("read_into", "", slow(0.05), ALWAYS)
        follower.start()
        for _ in range(3):
            version = trainer.publish(2)
            follower.wake()
            assert follower.once() == version
        assert follower.trouble == ""


class TestWake:
    @pytest.fixture(autouse=True)
    def _slowly(self, bucket: Troubled) -> None:
        bucket.poll_interval = 1000.0

    def test_woken_follower_looks_for_new_versions_at_once(
        self, trainer: Trainer, follower: Follower, into: Path
    ) -> None:
        trainer.publish()
        follower.start()
        until((into / "current").exists)  # the look is over: it would still find the next version
        trainer.publish()
        time.sleep(0.05)
        assert follower.version == 1
        follower.wake()
        until(lambda: follower.version == 2)

    def test_publisher_wakes_the_follower(self, bucket: Troubled, follower: Follower) -> None:
        with WakeupServer("0", wake=follower.wake, status=dict, metrics=bytes) as server:
            trainer = Trainer(bucket.inner, notify=[f"http://{server.address}/"])
            trainer.publish()
            follower.start()
            until(lambda: follower.version == 1)
            for version in (2, 3):
                trainer.publish()
                until(lambda version=version: follower.version == version)  # type: ignore[misc]
            trainer.close()
