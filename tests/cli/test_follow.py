"""`weightwire follow`: output, exit codes, and the state of the replica after errors and signals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from support.checkpoint_trainer import CheckpointTrainer
from support.commands import Running, Training, bits_of, state_of, versions_in, weightwire
from support.damage import HARMS, put_back, remove, snapshot
from support.stores import SeaweedFS, use
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.directory import DirectoryBucket
from weightwire.bucket.registry import open_bucket
from weightwire.cli.shared.json_output import RecoveredOutput, WarningOutput
from weightwire.cli.shared.run_output import FollowOutput
from weightwire.errors import PermissionDenied


def held(replica: Path) -> int:
    """The version of `current`. Checks that it is complete."""
    about = json.loads((replica / "current" / "weightwire.json").read_bytes())
    assert state_of(replica / "current") == about["state"]
    assert (replica / "current" / "config.json").read_bytes() == b'{"model_type": "tiny"}\n'
    return int(about["version"])


class TestFollowOnce:
    def test_follow_once_catches_up(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        path = trainer.publish()

        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once")

        assert (ran.code, ran.out) == (0, "")
        assert ran.err.startswith("version 2 (step 20): ")
        assert re.search(r", committed (just now|\S+ s ago), in (.*)\n$", ran.err)
        assert ran.err.endswith(f", in {replica / 'current'}\n")
        assert held(replica) == 2
        assert bits_of(replica / "current") == bits_of(path)

    def test_second_follow_once_fetches_only_new_versions(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        weightwire("follow", trainer.bucket, "--into", replica, "--once")
        nothing = weightwire("follow", trainer.bucket, "--into", replica, "--once", "--json")
        path = trainer.publish()
        something = weightwire("follow", trainer.bucket, "--into", replica, "--once", "--json")

        assert nothing.err == f"version 1 (step 10): held already, in {replica / 'current'}\n"
        assert json.loads(nothing.out)["bytes"] == 0
        figures = json.loads(something.out)
        assert (figures["version"], figures["bytes"]) == (2, versions_in(trainer.bucket)[2]["files"][0]["size"])
        assert Path(figures["checkpoint"]) == (replica / "current").resolve()
        assert bits_of(replica / "current") == bits_of(path)

    def test_run_from_a_base_needs_the_base(self, trainer: CheckpointTrainer, replica: Path, tmp_path: Path) -> None:
        training = Training(tmp_path / "based")
        base, path = training.save("base"), training.save("checkpoint-1")
        weightwire("publish", path, trainer.bucket, "--base", base, "--source", "elsewhere")

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed("elsewhere", "--base DIR")
        assert weightwire("follow", trainer.bucket, "--into", replica, "--once", "--base", base).code == 0
        assert bits_of(replica / "current") == bits_of(path)

    def test_heartbeat_has_the_given_name(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()

        weightwire("follow", trainer.bucket, "--into", replica, "--once", "--name", "rollout-7")

        beat = json.loads((trainer.bucket / "replicas" / "rollout-7.json").read_bytes())
        assert (beat["version"], beat["head"]) == (1, 1)


class TestErrors:
    def test_missing_run_is_an_error(self, tmp_path: Path, replica: Path) -> None:
        weightwire("follow", tmp_path / "nowhere", "--into", replica, "--once").check_failed(
            "nothing has been published there yet", "check the URL"
        )
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.parametrize("once", [True, False])
    @pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "hf://x"])
    def test_invalid_url_is_an_error(self, replica: Path, url: str, once: bool) -> None:
        weightwire("follow", url, "--into", replica, *(["--once"] if once else [])).check_failed()
        assert not replica.exists()

    @pytest.mark.parametrize("once", [True, False])
    def test_run_record_that_is_not_json_is_an_error(
        self, trainer: CheckpointTrainer, replica: Path, once: bool
    ) -> None:
        trainer.bucket.mkdir()
        (trainer.bucket / "run.json").write_text("hello")

        weightwire("follow", trainer.bucket, "--into", replica, *(["--once"] if once else [])).check_failed(
            "run.json: cannot be read"
        )

    def test_file_in_place_of_the_replica_is_kept(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        replica.write_text("mine")

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed(str(replica))
        assert replica.read_text() == "mine"

    def test_replica_in_use_is_refused(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        with Running("follow", trainer.bucket, "--into", replica) as following:
            following.wait_for("version 1")

            weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed(str(replica))

    def test_wrong_usage_is_refused(self, trainer: CheckpointTrainer, replica: Path) -> None:
        assert weightwire("follow", trainer.bucket).code == 2
        assert weightwire("follow", trainer.bucket, "--into", replica, "--once", "--listen", "0").code == 2
        weightwire("follow", trainer.bucket, "--into", replica, "--listen", "here").check_failed("HOST:PORT")
        ran = weightwire("follow", trainer.bucket, "--into", replica, "--name", "../x")
        assert (ran.code, "Invalid value for --name" in ran.err) == (2, True)
        assert not replica.exists()

    def test_read_only_bucket_can_be_followed(
        self, trainer: CheckpointTrainer, replica: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Patches the bucket: tests may run as root, which ignores file permissions."""
        path = trainer.publish()

        async def put(*_: object) -> NoReturn:
            raise PermissionDenied("it is read-only")

        monkeypatch.setattr(DirectoryBucket, "put", put)

        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once")

        assert ran.code == 0
        assert ran.err.startswith("warning: this key has no write permission, so this follower writes no heartbeats\n")
        assert bits_of(replica / "current") == bits_of(path)

    @pytest.mark.parametrize("once", [True, False])
    def test_bucket_without_read_permission_is_an_error(
        self, trainer: CheckpointTrainer, replica: Path, monkeypatch: pytest.MonkeyPatch, once: bool
    ) -> None:
        trainer.publish()

        async def get(*_: object) -> NoReturn:
            raise PermissionDenied("it is locked", hint="ask for the key")

        monkeypatch.setattr(DirectoryBucket, "get", get)

        weightwire("follow", trainer.bucket, "--into", replica, *(["--once"] if once else [])).check_failed("locked")
        assert not replica.exists()

    def test_port_in_use_is_an_error(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]

            weightwire("follow", trainer.bucket, "--into", replica, "--listen", port).check_failed(
                f"127.0.0.1:{port}: the port is in use by another program"
            )


def not_json(commit: dict[str, Any]) -> str:
    return "hello"


def cut(commit: dict[str, Any]) -> str:
    return json.dumps(commit)[:-20]


def newer_format(commit: dict[str, Any]) -> str:
    return json.dumps(commit | {"format": "weightwire/2"})


def broken_parent(commit: dict[str, Any]) -> str:
    return json.dumps(commit | {"parent": "0" * 64})


def foreign_run(commit: dict[str, Any]) -> str:
    return json.dumps(commit | {"run": "0" * 32})


def other_state(commit: dict[str, Any]) -> str:
    return json.dumps(commit | {"after": "0" * 64})


def other_version(commit: dict[str, Any]) -> str:
    return json.dumps(commit | {"version": commit["version"] + 1, "back": commit["back"], "files": []})


class TestDamage:
    """The command fails with a hint. The replica keeps its version and continues when the bucket is repaired."""

    @pytest.mark.parametrize(
        ("damage", "text"),
        [
            (not_json, "is not JSON"),
            (cut, "is not JSON"),
            (newer_format, "format version 2"),
            (broken_parent, "its parent hash differs"),
            (foreign_run, "run"),
            (other_state, "expected 000000000000"),
            (other_version, ""),
        ],
    )
    def test_damaged_commit_is_an_error_until_it_is_repaired(
        self, trainer: CheckpointTrainer, replica: Path, damage: Any, text: str
    ) -> None:
        before = trainer.publish()
        assert weightwire("follow", trainer.bucket, "--into", replica, "--once").code == 0
        after = trainer.publish()
        path = trainer.bucket / "commits" / f"{2:020}.json"
        good = path.read_bytes()
        path.write_text(damage(json.loads(good)))

        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once")

        ran.check_failed(text)
        assert held(replica) == 1
        assert bits_of(replica / "current") == bits_of(before)
        path.write_bytes(good)
        assert weightwire("follow", trainer.bucket, "--into", replica, "--once").code == 0
        assert bits_of(replica / "current") == bits_of(after)

    def test_damaged_delta_is_an_error(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        weightwire("follow", trainer.bucket, "--into", replica, "--once")
        trainer.publish()
        (delta,) = (trainer.bucket / "deltas" / "2").iterdir()
        data = delta.read_bytes()
        delta.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed(
            "its hash does not match the record"
        )
        assert held(replica) == 1

    def test_missing_delta_keeps_the_version_held(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        weightwire("follow", trainer.bucket, "--into", replica, "--once")
        trainer.publish()
        shutil.rmtree(trainer.bucket / "deltas" / "2")
        shutil.rmtree(trainer.bucket / "anchors")

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed("anchor")
        assert held(replica) == 1

    @pytest.mark.parametrize("harm", HARMS)
    def test_new_replica_gets_the_version_before_a_damaged_delta(
        self, trainer: CheckpointTrainer, replica: Path, harm: Callable[[Bucket, str], None]
    ) -> None:
        before = trainer.publish()
        after = trainer.publish()
        bucket = open_bucket(trainer.bucket)
        objects = snapshot(bucket)
        remove(bucket, "anchors/2/")
        harm(bucket, "deltas/2/")

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed(
            "this replica stays at version 1"
        )
        assert bits_of(replica / "current") == bits_of(before)
        put_back(bucket, objects)
        assert weightwire("follow", trainer.bucket, "--into", replica, "--once").code == 0
        assert bits_of(replica / "current") == bits_of(after)

    def test_rolled_back_bucket_is_refused(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        trainer.publish()
        weightwire("follow", trainer.bucket, "--into", replica, "--once")
        (trainer.bucket / "commits" / f"{2:020}.json").unlink()

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed(
            "does not have version 2", "rolled back"
        )
        assert held(replica) == 2

    def test_damaged_first_version_leaves_no_checkpoint(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        (trainer.bucket / "commits" / f"{1:020}.json").write_text("hello")

        weightwire("follow", trainer.bucket, "--into", replica, "--once").check_failed("is not JSON")
        assert not (replica / "current").exists()


class TestLongFollow:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_follow_runs_until_a_signal_stops_it(self, trainer: CheckpointTrainer, replica: Path, number: int) -> None:
        trainer.publish()
        with Running("follow", trainer.bucket, "--into", replica, "--json") as following:
            following.wait_for("version 1 (step 10): ")
            path = trainer.publish()
            following.wait_for("version 2 (step 20): ")
            ran = following.stop(number)

        lines = [json.loads(line) for line in ran.out.splitlines()]
        if number == signal.SIGINT:
            assert ran.code == 130
            assert ran.err.splitlines()[-1] == f"interrupted: {replica / 'current'} is version 2"
            assert lines.pop()["error"]["code"] == "WW-INTERRUPTED"
        else:
            assert ran.code == 0
            assert ran.err.splitlines()[-1] == f"stopped: {replica / 'current'} is version 2"
        for line in lines:
            msgspec.convert(line, FollowOutput)
        assert [(line["version"], line["step"]) for line in lines] == [(1, 10), (2, 20)]
        assert lines[-1]["state"] == state_of(path)
        assert lines[-1]["metrics"] == {"reward": 0.5}
        assert lines[-1]["bytes"] == versions_in(trainer.bucket)[2]["files"][0]["size"]
        assert held(replica) == 2

    def test_follow_waits_for_the_run_to_start(self, trainer: CheckpointTrainer, replica: Path) -> None:
        with Running("follow", trainer.bucket, "--into", replica) as following:
            following.wait_for(f"waiting for a run at {trainer.bucket}")
            path = trainer.publish()
            following.wait_for("version 1 (step 10): ")
            ran = following.stop()

        assert ran.code == 0
        assert "warning" not in ran.err
        assert bits_of(replica / "current") == bits_of(path)

    def test_interrupt_stops_waiting_for_the_run(self, trainer: CheckpointTrainer, replica: Path) -> None:
        with Running("follow", trainer.bucket, "--into", replica) as following:
            following.wait_for("waiting for a run")
            ran = following.stop(signal.SIGINT)

        assert (ran.code, ran.err.splitlines()[-1]) == (130, f"interrupted: {replica} holds no version yet")

    def test_follow_continues_after_a_kill(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        with Running("follow", trainer.bucket, "--into", replica) as following:
            following.wait_for("version 1")
            trainer.publish()
            following.wait_for("version 2")
            following.process.kill()
        assert held(replica) in (1, 2)
        path = trainer.publish()

        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once", "--json")

        assert json.loads(ran.out)["bytes"] == versions_in(trainer.bucket)[3]["files"][0]["size"]
        assert bits_of(replica / "current") == bits_of(path)

    def test_problem_and_recovery_are_each_reported_once(
        self, trainer: CheckpointTrainer, replica: Path, tmp_path: Path
    ) -> None:
        trainer.publish()
        with Running("follow", trainer.bucket, "--into", replica, "--json") as following:
            following.wait_for("version 1")
            path = trainer.bucket / "commits" / f"{2:020}.json"
            (tmp_path / "damaged").write_text("hello")
            (tmp_path / "damaged").rename(path)  # at once: the follower may look at any time
            following.wait_for("warning: ")
            following.wait_for("hint: ")
            time.sleep(1.5)
            path.unlink()
            following.wait_for("recovered: ")
            trainer.publish()
            following.wait_for("version 2")
            ran = following.stop()

        assert ran.code == 0
        assert ran.err.count("warning: ") == 1
        assert held(replica) == 2
        _, warning, recovered, _ = map(json.loads, ran.out.splitlines())
        warned = msgspec.convert(warning, WarningOutput).warning
        assert f"warning: {warned.message}\nhint: {warned.hint}\n" in ran.err
        assert f"{msgspec.convert(recovered, RecoveredOutput).recovered.message}\n" in ran.err


class TestOnS3:
    def test_read_only_key_can_follow(
        self, tmp_path: Path, replica: Path, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(monkeypatch, seaweedfs.env)
        training, url = Training(tmp_path / "out"), seaweedfs.url("cli-follow/run")
        assert weightwire("publish", training.save("checkpoint-1"), url).code == 0
        path = training.save("checkpoint-2")
        assert weightwire("publish", path, url).code == 0
        use(monkeypatch, seaweedfs.env_of("reader"))

        ran = weightwire("follow", url, "--into", replica, "--once")

        assert ran.code == 0, ran.err
        assert ran.err.startswith("warning: this key has no write permission")
        assert bits_of(replica / "current") == bits_of(path)
        weightwire("publish", training.save("checkpoint-3"), url).check_failed()

    @pytest.mark.parametrize("once", [True, False])
    def test_wrong_key_fails_at_once(
        self, replica: Path, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch, once: bool
    ) -> None:
        use(monkeypatch, seaweedfs.env | {"AWS_SECRET_ACCESS_KEY": "wrong"})

        ran = weightwire("follow", seaweedfs.url("cli-wrong"), "--into", replica, *(["--once"] if once else []))

        ran.check_failed("AWS_SECRET_ACCESS_KEY")
        assert not replica.exists()

    def test_missing_bucket_is_not_waited_for(
        self, replica: Path, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(monkeypatch, seaweedfs.env)

        with Running("follow", "s3://no-such-bucket/run", "--into", replica) as following:
            ran = following.end()  # it does not wait for the bucket

        ran.check_failed("create the bucket")
