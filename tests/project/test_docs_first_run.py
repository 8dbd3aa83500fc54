"""Runs the commands and the code of docs/first-run.md, docs/concepts.md and docs/install.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import bits_of
from support.doc_models import save_checkpoints
from support.doc_pages import ROOT, blocks, commands, run_commands, run_python, terminals
from support.stores import free_ports


def test_installation_check_of_the_docs_works(tmp_path: Path) -> None:
    [block] = blocks("docs/install.md", "Check")
    assert "kernel     compiled" in run_commands(block.replace("/tmp/run", "run"), tmp_path)


@pytest.mark.slow
def test_example_with_own_checkpoints_prints_the_shown_lines(tmp_path: Path) -> None:
    publish_and_follow, pages = blocks("docs/first-run.md", "Your own checkpoints")
    save_checkpoints(tmp_path)
    said = run_commands(publish_and_follow.replace("/tmp/run", "run"), tmp_path)
    [shown] = blocks("docs/first-run.md", "Your own checkpoints", "text")
    for line in shown.splitlines():  # ages, names and times differ
        assert line.split() in [one.split() for one in said.splitlines()] or " ago" in line, line
    assert "version 3" in said
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-200")
    live, export = commands(pages.replace("/tmp/run", "run"))
    with terminals(f"{live} --port 0 --no-open", directory=tmp_path) as [page]:
        page.wait_for("http://127.0.0.1")
    run_commands(export, tmp_path)
    assert (tmp_path / "run.html").exists()


@pytest.mark.slow
def test_concepts_example_prints_the_shown_versions(tmp_path: Path) -> None:
    """The kinds and the numbers of changed weights are those that the page shows."""
    [block] = blocks("docs/concepts.md", "An example")
    [shown] = blocks("docs/concepts.md", "An example", "text")
    save_checkpoints(tmp_path)
    printed = run_commands(block, tmp_path).splitlines()
    for line in shown.splitlines()[1:]:
        version, kind, step = line.split()[:3]
        [row] = [one.split() for one in printed if one.split()[:2] == [version, kind]]
        assert row[2] == step
        if kind == "delta":
            assert "255" in row
            assert "255" in line


@pytest.mark.slow
def test_example_without_a_bucket_gives_the_new_checkpoint(tmp_path: Path) -> None:
    [block] = blocks("docs/first-run.md", "Deltas without a bucket")
    [code] = blocks("docs/first-run.md", "Deltas without a bucket", "python")
    save_checkpoints(tmp_path)
    run_commands(block, tmp_path)
    assert bits_of(tmp_path / "patched") == bits_of(tmp_path / "checkpoint-200")
    before = """
from pathlib import Path
import ml_dtypes, safetensors.numpy
weights = {}
for path in sorted(Path("checkpoint-100").glob("*.safetensors")):
    weights |= safetensors.numpy.load_file(path)
"""
    after = """
assert weightwire.digest(weights).hex == state.hex == weightwire.digest("checkpoint-200").hex
"""
    run_python(before + code + after, tmp_path)


@pytest.mark.slow
def test_demo_by_hand_publishes_versions(tmp_path: Path) -> None:
    """The processes are started in the order of the page, on free ports; the trainer publishes from their games."""
    [block] = blocks("docs/first-run.md", "The demo by hand")
    environment, first, second, page = free_ports(4)
    ports = {"8000": str(first), "8001": str(second), "/tmp/wordle": str(tmp_path / "wordle")}
    listed = commands(block)
    for old, new in ports.items():
        listed = [command.replace(old, new) for command in listed]
    options = {
        "environment.py": f"--port {environment}",
        "weightwire serve": "--threads 1",
        "train.py": f"--environment http://127.0.0.1:{environment} --groups 2 --games 4 --threads 1",
        "weightwire page": f"--port {page} --no-open",
    }
    listed = [f"{one} {next(more for name, more in options.items() if name in one)}" for one in listed]
    with terminals(*listed, directory=ROOT, logs=tmp_path) as [_, *servers, trainer, shown]:
        trainer.wait_for("step 1")
        for server in servers:
            server.wait_for("version 1")
        shown.wait_for("http://127.0.0.1")
