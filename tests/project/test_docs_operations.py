"""Runs the commands and the code of docs/operations.md."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from support.commands import Running, bits_of
from support.doc_models import save_checkpoints
from support.doc_pages import blocks, filled, run_commands, run_python, run_shell
from support.http_client import ask
from support.stores import SeaweedFS, free_ports


def test_operations_examples_work_on_one_run(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    """Monitoring, retention, a rollback and an anchor, on one run in a real store."""
    [roll_back] = blocks("docs/operations.md", "Roll back")
    [publish_an_anchor] = blocks("docs/operations.md", "Publish an anchor")
    [gc] = blocks("docs/operations.md", "Retention")
    [look] = blocks("docs/operations.md", "Is it working?")
    save_checkpoints(tmp_path)
    url = seaweedfs.url("docs-operations")

    def run(script: str) -> str:
        return run_commands(filled(script, bucket=url), tmp_path, seaweedfs.env)

    run("weightwire publish checkpoint-100 s3://bucket/run\nweightwire publish checkpoint-200 s3://bucket/run")
    assert "no problems found" in run(look)
    assert "nothing to delete" in run(gc)
    run(roll_back + "weightwire follow s3://bucket/run --into replica --once")
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-100")
    assert "0% changed, plus an anchor" in run(publish_an_anchor)


def test_metrics_example_prints_the_documented_metrics(tmp_path: Path) -> None:
    [block] = blocks("docs/operations.md", "Metrics", "python")
    save_checkpoints(tmp_path)
    printed = run_python(filled(block, bucket="run", model="checkpoint-100"), tmp_path)
    assert 'weightwire_version{role="publisher"} 1.0' in printed
    for name in ("weightwire_stage_seconds", "weightwire_bytes_total", "weightwire_warnings_total"):
        assert name in printed


def test_readiness_example_answers(tmp_path: Path) -> None:
    [block] = blocks("docs/operations.md", "Readiness")
    save_checkpoints(tmp_path)
    run_commands("weightwire publish checkpoint-100 run", tmp_path)
    [port] = free_ports(1)
    follow, curl = block.replace("8100", str(port)).splitlines()
    words = [{"s3://bucket/run": str(tmp_path / "run"), "replica": str(tmp_path / "replica")}.get(one, one)
             for one in shlex.split(follow)]  # fmt: skip
    with Running(*words[1:]) as following:
        following.wait_for("version 1")
        address, _, path = curl.removeprefix("curl ").partition("/")
        reply, body = ask(address, f"/{path}")
    assert (reply.status, json.loads(body)) == (200, {"ready": True, "reasons": []})


@pytest.mark.slow
def test_copied_run_can_be_followed(tmp_path: Path) -> None:
    """A mirror is followed. One that is behind, or has commits without their data, is only late."""
    [block] = blocks("docs/operations.md", "Copy a run")
    save_checkpoints(tmp_path)
    copy = block.partition("\n}\n")[0] + "\n}\n"
    run_commands("weightwire publish checkpoint-100 run", tmp_path)
    run_shell(block, tmp_path)
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-100")
    run_commands("weightwire publish checkpoint-200 run\ncp -r run/commits mirror/", tmp_path)
    late = run_shell("! weightwire follow mirror --into replica --once", tmp_path)
    assert "no anchor leads past it" in late
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-100")
    run_shell(copy + "copy run mirror\nweightwire follow mirror --into replica --once", tmp_path)
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-200")
    assert list((tmp_path / "mirror/replicas").iterdir())
    assert not (tmp_path / "run/replicas").exists()
