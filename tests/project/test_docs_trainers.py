"""Runs the code of docs/trainers.md. Its TRL example is run by tests/trainers/test_trl_trainer.py."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.commands import Training, bits_of, versions_in
from support.doc_models import MODEL, SAVE, followed
from support.doc_pages import blocks, filled, run_commands, run_python, terminals
from support.stores import SeaweedFS


@pytest.mark.slow
def test_attach_example_publishes_the_trained_weights(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/trainers.md", "PyTorch", "python")
    run_python(MODEL.format(model=str(tiny)) + filled(block, bucket=tmp_path / "bucket", model=tiny) + SAVE, tmp_path)
    assert followed(tmp_path / "bucket", tmp_path / "replica") == bits_of(tmp_path / "trained")
    assert (tmp_path / "replica/current/config.json").exists()


@pytest.mark.slow
def test_publish_example_resumes_the_run(tiny: Path, tmp_path: Path) -> None:
    """A trainer resumes from its own checkpoint, then from the run. Neither publishes other weights first."""
    [publish] = blocks("docs/trainers.md", "Publisher", "python")
    [restore] = blocks("docs/trainers.md", "Resume")
    from_checkpoint, from_run = blocks("docs/trainers.md", "Resume", "python")
    save = """
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "training.pt")
from weightwire.trainers.torch import attach
def train(model, optimizer):
    loss_of(model, batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    bucket = tmp_path / "bucket"
    script = MODEL.format(model=str(tiny)) + publish + save + from_checkpoint
    assert "differ from version" not in run_python(filled(script, bucket=bucket, model=tiny), tmp_path)
    assert "(step 3)" in run_commands(filled(restore, bucket=bucket), tmp_path)
    script = MODEL.format(model=str(tiny)) + "step = 3" + save + from_run.replace("step=2", "step=3") + SAVE
    assert "differ from version" not in run_python(filled(script, bucket=bucket), tmp_path)
    assert followed(bucket, tmp_path / "replica") == bits_of(tmp_path / "trained")
    steps = [
        (commit["step"], commit.get("changed", 0) > 0) for commit in versions_in(bucket) if commit["kind"] == "delta"
    ]
    # On a slow machine step 2 replaces step 1, which still waits for the base to be stored.
    assert [one for one in steps if one != (1, True)] == [(2, True), (2, False), (3, True), (3, False), (4, True)]


@pytest.mark.slow
def test_fsdp2_example_publishes_from_all_ranks(tmp_path: Path) -> None:
    [block] = blocks("docs/trainers.md", "FSDP2", "python")
    before = """
        import os, torch
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        def make_model():
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        def train(model, optimizer):
            model(torch.ones(2, 7)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    after = """
        whole = {name: one.full_tensor().detach().to(torch.bfloat16) for name, one in model.named_parameters()}
        if torch.distributed.get_rank() == 0:
            from safetensors.torch import save_file
            save_file(whole, "trained.safetensors")
        torch.distributed.destroy_process_group()
    """
    block = block.replace("init_process_group()", 'init_process_group("gloo")').replace(', files="path/to/model"', "")
    (tmp_path / "script.py").write_text(
        textwrap.dedent(before) + filled(block, bucket=tmp_path / "bucket") + textwrap.dedent(after)
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    ran = subprocess.run(
        [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert followed(tmp_path / "bucket", tmp_path / "replica") == bits_of(tmp_path / "trained.safetensors")


@pytest.mark.slow
def test_hugging_face_trainer_example_publishes_the_trained_weights(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/trainers.md", "Hugging Face Trainer", "python")
    before = MODEL.format(model=str(tiny)) + textwrap.dedent("""
        from transformers import TrainingArguments
        args = TrainingArguments("out", max_steps=3, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1)
        dataset = [{"input_ids": row, "labels": row} for row in torch.randint(5, 200, (32, 8))]
    """)
    printed = run_python(before + filled(block, bucket=tmp_path / "bucket") + SAVE, tmp_path)
    assert "sync/version" in printed
    assert followed(tmp_path / "bucket", tmp_path / "replica") == bits_of(tmp_path / "trained")


@pytest.mark.slow
def test_examples_for_other_frameworks_publish_checkpoints(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    watch, publish = blocks("docs/trainers.md", "Other frameworks")
    url = seaweedfs.url("docs-trainers")
    training = Training(tmp_path / "outputs")
    training.save("checkpoint-100")
    with terminals(filled(watch, bucket=url).strip(), directory=tmp_path, variables=seaweedfs.env) as [watching]:
        watching.wait_for("version 1")
    training.save("checkpoint-200")
    assert "version 3" in run_commands(filled(publish, bucket=url), tmp_path, seaweedfs.env)
