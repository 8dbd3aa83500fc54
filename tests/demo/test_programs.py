"""The demo's programs exist and accept their command lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from weightwire.demo import programs


def test_the_example_is_found() -> None:
    example = programs.find_example()
    assert {"environment.py", "policy", "train.py"} <= {path.name for path in example.iterdir()}


def test_our_own_server_needs_no_follower(tmp_path: Path) -> None:
    one = programs.replica("torch", 1, Path("example"), "s3://bucket/run", tmp_path, 8000)
    assert (one.name, one.url, one.into, one.follower) == (
        "replica-1",
        "http://127.0.0.1:8000",
        tmp_path / "replica-1",
        None,
    )
    assert "s3://bucket/run" in one.server.argv


def test_vllm_has_a_follower_and_does_not_know_the_run(tmp_path: Path) -> None:
    one = programs.replica("vllm", 2, Path("example"), "s3://bucket/run", tmp_path, 8000)
    assert one.follower is not None
    assert "s3://bucket/run" in one.follower.argv
    assert "vllm=http://127.0.0.1:8000" in one.follower.argv
    assert "s3://bucket/run" not in one.server.argv
    assert one.server.env["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.slow
def test_the_programs_accept_their_options(tmp_path: Path) -> None:
    """With --help at the end, a program still rejects unknown options before it."""
    example = programs.find_example()
    replica = programs.replica("torch", 1, example, "run", tmp_path, 8000)
    follower = programs.replica("vllm", 1, example, "run", tmp_path, 8000).follower
    trainer = programs.trainer(example, "run", "http://127.0.0.1:1", [replica], 3, 0, tmp_path / "trained")
    assert follower is not None
    for command in (programs.environment(example, 8000), replica.server, follower, trainer):
        ran = subprocess.run([*map(str, command.argv), "--help"], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        options = {str(word) for word in command.argv if str(word).startswith("--")}
        assert {option for option in options if option not in ran.stdout} == set()
