"""Runs the commands of docs/security.md, in their order, on one run."""

from __future__ import annotations

from pathlib import Path

from support.commands import bits_of
from support.doc_models import save_checkpoints
from support.doc_pages import blocks, filled, run_commands


def test_security_examples_work_on_one_run(tmp_path: Path) -> None:
    make_key, sign = blocks("docs/security.md", "Sign a run in five minutes")
    [rotate] = blocks("docs/security.md", "Replace or revoke a key")
    save_checkpoints(tmp_path)
    run = str(tmp_path / "signed")

    def do(script: str) -> str:
        return run_commands(filled(script).replace("/tmp/signed", run), tmp_path)

    assert "ed25519:" in do(make_key)
    assert (tmp_path / "trainer").stat().st_mode & 0o777 == 0o600
    assert "a trusted key signed the newest version" in do(sign)
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-100")
    assert "changes the keys" in do(rotate)
    do(f"weightwire follow {run} --into replica --once --trust trainer.pub")
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-200")
    do(f"weightwire follow {run} --into late --once --trust new-trainer.pub")
    assert bits_of(tmp_path / "late/current") == bits_of(tmp_path / "checkpoint-200")


def test_status_of_an_unsigned_run_prints_the_documented_line(tmp_path: Path) -> None:
    [line] = blocks("docs/security.md", "Security", "text")
    save_checkpoints(tmp_path)
    printed = run_commands("weightwire publish checkpoint-100 run\nweightwire status run", tmp_path)
    assert " ".join(line.split()) in " ".join(printed.split())
