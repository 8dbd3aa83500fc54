"""`weightwire follow --engine` with unreachable engines, and `--listen`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.checkpoint_trainer import CheckpointTrainer
from support.commands import Running, bits_of, weightwire


class TestEngines:
    """tests/engines/vllm tests running engines."""

    @pytest.mark.parametrize("text", ["http://127.0.0.1:8000", "vllm=127.0.0.1:8000", "tensorrt=http://127.0.0.1:8000"])
    def test_malformed_engine_is_refused(self, trainer: CheckpointTrainer, replica: Path, text: str) -> None:
        trainer.publish()
        ran = weightwire("follow", trainer.bucket, "--into", replica, "--engine", text)
        assert ran.code == 2
        assert "--engine" in ran.err
        assert "vllm=http://127.0.0.1:8000" in ran.err
        assert not replica.exists()

    def test_unreachable_engine_with_once_is_an_error(self, trainer: CheckpointTrainer, replica: Path) -> None:
        path = trainer.publish()
        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once", "--engine", "vllm=http://127.0.0.1:9")
        assert ran.code == 1
        assert "error: http://127.0.0.1:9: cannot be reached" in ran.err
        assert "hint: start vLLM there" in ran.err
        assert bits_of(replica / "current") == bits_of(path)  # the replica is updated

    def test_unreachable_engine_with_once_is_one_json_document(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        engine = ["--engine", "vllm=http://127.0.0.1:9"]
        ran = weightwire("follow", trainer.bucket, "--into", replica, "--once", "--json", *engine)
        assert ran.code == 1
        assert json.loads(ran.out)["error"]["code"] == "WW-ENGINE-GONE"

    def test_unreachable_engine_is_waited_for(self, trainer: CheckpointTrainer, replica: Path) -> None:
        trainer.publish()
        with Running(
            "follow", trainer.bucket, "--into", replica, "--engine", "vllm=http://127.0.0.1:9", "--json"
        ) as command:
            command.wait_for("warning: http://127.0.0.1:9: cannot be reached")
            trainer.publish()
            command.wait_for('"version": 2,', stream="out")
            ran = command.stop()
        assert ran.code == 0
        assert ran.err.count("cannot be reached") == 1
        assert '"pause_seconds": {}' in ran.out


class TestListening:
    def test_listener_serves_wake_status_and_metrics(self, trainer: CheckpointTrainer, replica: Path) -> None:
        path = trainer.publish()
        with Running("follow", trainer.bucket, "--into", replica, "--listen", "0") as following:
            address = following.wait_for("listening on ").split()[-1]
            following.wait_for("version 1")
            request = urllib.request.Request(f"{address}/wake", b"{}", method="POST")
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.status == 202
            with urllib.request.urlopen(f"{address}/status", timeout=60) as response:
                status = json.load(response)
            with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
                metrics = response.read().decode()
            ran = following.stop()

        assert ran.code == 0
        assert status == {
            "ready": True,
            "version": 1,
            "head": 1,
            "behind": 0,
            "behind_seconds": 0.0,
            "trouble": "",
            "reasons": [],
            "engines": [],
        }
        assert 'weightwire_version{role="follower"} 1.0' in metrics
        assert 'weightwire_stage_seconds_count{role="follower",stage="apply"} 1.0' in metrics
        assert bits_of(replica / "current") == bits_of(path)

    def test_listener_serves_status_before_the_run_starts(self, trainer: CheckpointTrainer, replica: Path) -> None:
        with Running("follow", trainer.bucket, "--into", replica, "--listen", "127.0.0.1:0") as following:
            address = following.wait_for("listening on ").split()[-1]
            with urllib.request.urlopen(address, timeout=60) as response:
                status = json.load(response)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{address}/readyz", timeout=60)
            assert following.stop().code == 0
        assert (status["version"], status["head"], status["behind"]) == (None, None, None)
        assert status["reasons"] == ["this replica: no version of this run yet"]
