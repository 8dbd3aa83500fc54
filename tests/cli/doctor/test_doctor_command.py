"""`weightwire doctor` on directories, and on real stores with different permissions."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpoint_trainer import CheckpointTrainer
from support.commands import Ran, Training, tree, weightwire
from support.stores import NOWHERE, Rclone, SeaweedFS, environment, use
from weightwire.cli.doctor import diagnosis

fresh = itertools.count()
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, requests are slow and the clock of the store seems wrong."""
    monkeypatch.setattr(diagnosis, "_SLOW", 60.0)
    monkeypatch.setattr(diagnosis, "_SKEW", 60.0)


def states(ran: Ran) -> dict[str, str]:
    """Check -> state, of the lines on stdout."""
    lines = [line.split() for line in ran.out.splitlines()[:-1] if not line.startswith(" ")]
    return {name: state for state, name, *_ in lines}


def summary(ran: Ran) -> str:
    return ran.out.splitlines()[-1]


class TestDirectory:
    def test_empty_directory_is_ok_and_stays_empty(self, tmp_path: Path) -> None:
        ran = weightwire("doctor", tmp_path)

        assert (ran.code, ran.err) == (0, "")
        assert set(states(ran).values()) == {"ok"}
        assert summary(ran) == "can follow and publish (everything is ok)"
        assert list(tmp_path.iterdir()) == []

    def test_missing_directory_is_not_created(self, tmp_path: Path) -> None:
        ran = weightwire("doctor", tmp_path / "nowhere" / "run")

        assert ran.code == 0
        assert states(ran)["store"] == "warning"
        assert "a publisher would create it" in ran.out
        assert summary(ran) == "can follow and publish (1 warning)"
        assert list(tmp_path.iterdir()) == []

    def test_directory_that_cannot_be_created_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        ran = weightwire("doctor", tmp_path / "file" / "run")

        assert ran.code == 1
        assert states(ran)["store"] == "problem"
        assert f"check the path, or make {tmp_path / 'file'} a writable directory" in ran.out
        assert summary(ran) == "can follow, cannot publish (1 problem)"

    def test_directory_that_the_file_system_does_not_allow_is_a_problem(self) -> None:
        ran = weightwire("doctor", "/proc/foo")
        assert ran.code == 1
        assert summary(ran) == "can follow, cannot publish (1 problem)"

    def test_file_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        ran = weightwire("doctor", tmp_path / "file")

        assert ran.code == 1
        assert f"{tmp_path / 'file'}: not a directory" in ran.out
        assert summary(ran) == "can neither follow nor publish (1 problem)"

    def test_directory_with_other_files_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        ran = weightwire("doctor", tmp_path)

        assert ran.code == 1
        assert states(ran)["run"] == "problem"
        assert f"{tmp_path}: contains files but no run" in ran.out
        assert summary(ran) == "can neither follow nor publish (1 problem)"
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    def test_run_is_not_changed(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        trainer.close()
        before = tree(trainer.bucket)
        ran = weightwire("doctor", trainer.bucket, "--into", replica)

        assert ran.code == 0
        assert "version 1: 1 file" in ran.out
        assert states(ran)["disk"] == "ok"
        assert tree(trainer.bucket) == before
        assert not replica.exists()

    def test_full_disk_is_a_problem(
        self, trainer: CheckpointTrainer, replica: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish()
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 1000))
        ran = weightwire("doctor", trainer.bucket, "--into", replica)

        assert ran.code == 1
        assert states(ran)["disk"] == "problem"
        assert "hint: free space there" in ran.out
        assert summary(ran) == "can publish, cannot follow (1 problem)"

    def test_damaged_run_is_a_problem(self, trainer: CheckpointTrainer) -> None:
        trainer.publish()
        (trainer.bucket / "run.json").write_text("damaged")
        ran = weightwire("doctor", trainer.bucket)

        assert ran.code == 1
        assert "hint: restore run.json" in ran.out
        assert summary(ran) == "can neither follow nor publish (1 problem)"

    def test_missing_kernel_is_a_warning(self, tmp_path: Path, without_kernel: None) -> None:
        ran = weightwire("doctor", tmp_path)
        assert ran.code == 0
        assert states(ran)["kernel"] == "warning"
        assert summary(ran) == "can follow and publish (1 warning)"

    def test_doctor_writes_json(self, tmp_path: Path) -> None:
        ran = weightwire("doctor", tmp_path, "--json")
        found = json.loads(ran.out)

        assert (ran.code, ran.err) == (0, "")
        assert (found["url"], found["ok"], found["can_follow"], found["can_publish"]) == (
            str(tmp_path),
            True,
            True,
            True,
        )
        assert {tuple(check) for check in found["checks"]} == {("name", "result", "message", "hint")}
        for rate in ("upload_bytes_per_second", "download_bytes_per_second", "latency_seconds"):
            assert found[rate] > 0


class TestEngines:
    def test_unreachable_engine_is_a_problem(self, tmp_path: Path) -> None:
        ran = weightwire("doctor", tmp_path, "--engine", "vllm=http://127.0.0.1:1")

        assert ran.code == 1
        assert states(ran)["engine"] == "problem"
        assert states(ran)["memory"] == "ok"
        assert "Connection refused" in ran.out
        assert summary(ran) == "can publish, cannot follow (1 problem)"

    def test_unknown_engine_is_a_problem(self, tmp_path: Path) -> None:
        ran = weightwire("doctor", tmp_path, "--engine", "nothing=http://127.0.0.1:1")
        assert ran.code == 1
        assert "unknown engine 'nothing'" in ran.out

    def test_malformed_engine_is_a_usage_error(self, tmp_path: Path) -> None:
        ran = weightwire("doctor", tmp_path, "--engine", "http://user:SECRET@127.0.0.1")
        assert ran.code == 2
        assert "SECRET" not in ran.err


Examine = Callable[..., Ran]


@pytest.fixture
def url(seaweedfs: SeaweedFS) -> str:
    return seaweedfs.url(f"doctor-{next(fresh)}")


@pytest.fixture
def examine(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Examine:
    def run(key: str, *args: str | Path) -> Ran:
        use(monkeypatch, seaweedfs.env_of(key))
        return weightwire(*args)

    return run


class TestObjectStore:
    def test_full_key_can_follow_and_publish(self, examine: Examine, url: str) -> None:
        ran = examine("admin", "doctor", url)
        assert (ran.code, summary(ran)) == (0, "can follow and publish (everything is ok)")
        assert set(states(ran)) >= {"list", "read", "write", "create", "delete", "latency", "bandwidth", "clock", "run"}

    def test_read_only_key_can_follow(self, examine: Examine, url: str, tmp_path: Path) -> None:
        examine("admin", "publish", Training(tmp_path).save("checkpoint-1"), url)
        ran = examine("reader", "doctor", url)

        assert ran.code == 0
        assert states(ran)["write"] == "warning"
        assert states(ran)["run"] == "ok"
        assert "download" in ran.out
        assert summary(ran) == "can follow, cannot publish (1 warning)"

    def test_key_without_list_permission_can_follow(self, examine: Examine, url: str, tmp_path: Path) -> None:
        examine("admin", "publish", Training(tmp_path).save("checkpoint-1"), url)
        ran = examine("blind", "doctor", url)

        assert ran.code == 0
        assert states(ran)["list"] == states(ran)["write"] == "warning"
        assert summary(ran) == "can follow, cannot publish (2 warnings)"

    def test_unknown_key_is_a_problem(self, examine: Examine, url: str) -> None:
        ran = examine("nobody", "doctor", url)
        assert ran.code == 1
        assert summary(ran).startswith("can neither follow nor publish")
        assert "AWS_ACCESS_KEY_ID" in ran.out

    def test_missing_bucket_is_a_problem(self, examine: Examine) -> None:
        ran = examine("admin", "doctor", "s3://no-such-bucket/run")
        assert ran.code == 1
        assert states(ran)["store"] == "problem"
        assert "hint: create the bucket" in ran.out

    def test_store_without_atomic_create_is_a_problem(self, rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, rclone.env)
        ran = weightwire("doctor", rclone.url(f"doctor-{next(fresh)}"))

        assert ran.code == 1
        assert states(ran)["create"] == "problem"
        assert "can follow, cannot publish" in summary(ran)


@pytest.mark.parametrize("as_json", [False, True])
def test_unreachable_store_is_a_problem(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment(NOWHERE, "key", "secret"))
    ran = weightwire("doctor", "s3://bucket/run", *(["--json"] if as_json else []))

    assert ran.code == 1
    assert "Connection refused" in ran.out
    if as_json:
        assert [check["name"] for check in json.loads(ran.out)["checks"]] == ["store", "kernel"]
