"""What the README shows is run: each block as it stands, with a bucket, a model and a server of our own.

The one for TRL is run by tests/trainers/test_trl_trainer.py.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands import Running, bits_of
from support.readme import blocks, filled
from support.vllm_server import VLLM
from weightwire import Follower, Publisher
from weightwire.weights.source import read_weights


def run(code: str, directory: Path) -> str:
    """In a process of its own, as a user would."""
    script = directory / "script.py"
    script.write_text(code)
    ran = subprocess.run([sys.executable, script], cwd=directory, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def followed(bucket: Path, into: Path) -> dict[str, bytes]:
    with Follower(bucket, into=into) as follower:
        follower.once()
        return bits_of(follower.checkpoint())


MODEL = """
import torch
from transformers import AutoModelForCausalLM
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = torch.randint(5, 200, (3, 2, 8))
def loss_of(model, batch):
    return model(batch, labels=batch).loss
def train(model, batch):
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SAVE = """
model.to(torch.bfloat16).save_pretrained("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_pytorch(number: int, tiny: Path, tmp_path: Path) -> None:
    block = filled(blocks("PyTorch")[number], bucket=tmp_path / "bucket", model=tiny)
    run(MODEL.format(model=str(tiny)) + block + SAVE, tmp_path)
    assert followed(tmp_path / "bucket", tmp_path / "replica") == bits_of(tmp_path / "trained")
    assert (tmp_path / "replica/current/config.json").exists()


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    [block] = blocks("FSDP2")
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
def test_hugging_face_trainer(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("Hugging Face Trainer")
    before = MODEL.format(model=str(tiny)) + textwrap.dedent("""
        from transformers import TrainingArguments
        args = TrainingArguments("out", max_steps=3, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1)
        dataset = [{"input_ids": row, "labels": row} for row in torch.randint(5, 200, (32, 8))]
    """)
    printed = run(before + filled(block, bucket=tmp_path / "bucket") + SAVE, tmp_path)
    assert "sync/version" in printed
    assert followed(tmp_path / "bucket", tmp_path / "replica") == bits_of(tmp_path / "trained")


@pytest.mark.slow
def test_a_torch_module(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("A torch module")
    with Publisher(tmp_path / "bucket", base=tiny) as publisher:
        weights = _changed(tiny)
        publisher.publish(weights).wait()
        published = publisher.version
    before = MODEL.format(model=str(tiny)) + textwrap.dedent(f"""
        import shutil, time
        model = model.to(torch.bfloat16)
        def until_served():
            while engine.version != {published}:
                time.sleep(0.01)
                yield "hello"
        requests = until_served()
        def answer(model, request, version):
            print(version)
    """)
    block = filled(block, bucket=tmp_path / "bucket", replica=tmp_path / "replica")
    block = block.replace('into="', f'base="{tiny}", into="')
    run(before + block + SAVE, tmp_path)
    expected = {name: bytes(bits) for name, (_, _, bits) in weights.items()}
    assert {name: one for name, one in bits_of(tmp_path / "trained").items() if name in expected} == expected


@pytest.mark.slow
def test_anything_else(tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("Anything else")
    weights = _changed(tiny)
    with Publisher(tmp_path / "bucket") as publisher:
        publisher.publish(tiny).wait()
        block = filled(block, bucket=tmp_path / "bucket", replica=tmp_path / "replica")
        publisher.publish(weights).wait()
    after = """
safetensors.torch.save_file(weights, "held.safetensors")
"""
    run(block.replace("timeout=60", "timeout=1") + after, tmp_path)
    expected = {name: bytes(bits) for name, (_, _, bits) in weights.items()}
    assert bits_of(tmp_path / "held.safetensors") == expected


def test_vllm(vllm: VLLM, tiny: Path, tmp_path: Path) -> None:
    [block] = blocks("vLLM", "")
    _, serve, follow = (line.split("#")[0] for line in block.strip().splitlines())
    words = shlex.split(serve)
    assert words[0] == "VLLM_SERVER_DEV_MODE=1"
    ours, theirs = (json.loads(str(one[one.index("--weight-transfer-config") + 1])) for one in (vllm._command, words))
    assert ours == theirs
    bucket = tmp_path / "bucket"
    with Publisher(bucket, base=tiny) as publisher:
        command = shlex.split(filled(follow, bucket=bucket, replica=tmp_path / "replica", server=vllm.url))
        with Running(*command[1:], "--base", tiny) as running:
            version = publisher.publish(_changed(tiny)).wait()
            running.wait_for(f"version {version}")
            assert vllm.weight_version == str(version)
        choices: list[dict[str, Any]] = vllm.post(
            "/inference/v1/generate", {"token_ids": [9, 9], "sampling_params": {"max_tokens": 4, "temperature": 0}}
        )["choices"]
        names: dict[str, Any] = {"choices": choices, "publisher": publisher}
        exec(blocks("vLLM")[0], names)
        assert names["fresh"] == choices


def _changed(model: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """A step later."""
    weights = read_weights(model)
    changed = {name: (one.dtype.name, one.shape, one.bits.copy()) for name, one in weights.items()}
    for _, _, bits in changed.values():
        bits[::101] ^= 1
    return changed
