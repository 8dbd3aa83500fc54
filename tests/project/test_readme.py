"""Runs the commands and the code of README.md. The other examples are in docs/: see test_docs_*.py."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import weightwire
from support.commands import Running, bits_of
from support.doc_models import MODEL, SAVE, check_serve_command, followed, one_step_later
from support.doc_pages import ROOT, blocks, commands, filled, run_commands, run_python, run_shell, terminals
from support.stores import free_ports
from support.vllm_server import VLLM
from weightwire import Publisher


def test_readme_can_be_read_in_five_minutes() -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    assert 1000 <= len(text.split()) <= 1300


@pytest.mark.slow
def test_readme_example_with_your_own_checkpoint_works(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "checkpoint-100")
    weightwire.diff(tiny, one_step_later(tiny)).write(tmp_path / "step.delta")
    run_commands("weightwire patch checkpoint-100 step.delta -o checkpoint-200", tmp_path)
    [port] = free_ports(1)
    first, second = (
        commands(block.replace("/tmp/run", "run").replace("8000", str(port)))
        for block in blocks("README.md", "Your own checkpoint")
    )
    install, publish, serve = first
    assert install == "pip install '.[page,serve]'"
    publish_next, curl, status, page = second
    run_commands(publish, tmp_path)
    with terminals(f"{serve} --port {port}", f"{page} --port 0 --no-open", directory=tmp_path) as (serving, shown):
        serving.wait_for("version 1")
        run_commands(publish_next, tmp_path)
        serving.wait_for("version 3")
        [choice] = json.loads(run_shell(curl.replace("curl", "curl -sS"), tmp_path))["choices"]
        assert [span["version"] for span in choice["weight_versions"]] == ["3"]
        assert "version 3" in run_commands(status, tmp_path)
        shown.wait_for("http://")


@pytest.mark.slow
def test_readme_example_for_a_trainer_publishes_the_trained_weights(tiny: Path, tmp_path: Path) -> None:
    block = blocks("README.md", "From a trainer", "python")[0]
    run_python(MODEL.format(model=str(tiny)) + filled(block, bucket=tmp_path / "bucket", model=tiny) + SAVE, tmp_path)
    assert followed(tmp_path / "bucket", tmp_path / "replica") == bits_of(tmp_path / "trained")


def test_readme_example_for_vllm_updates_the_server(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("README.md", "Into vLLM")
    serve, follow = commands(block)
    check_serve_command(serve, vllm)
    bucket = tmp_path / "bucket"
    command = shlex.split(filled(follow, bucket=bucket, server=vllm.url))
    command[command.index("--into") + 1] = str(tmp_path / "replica")
    with Publisher(bucket, base=tiny) as publisher, Running(*command[1:], "--base", tiny) as running:
        version = publisher.publish(one_step_later(tiny)).wait()
        running.wait_for(f"version {version}")
        assert vllm.weight_version == str(version)
