"""The model, the bucket and the server that the examples in README.md and docs/ are run with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from support.commands import Training, bits_of
from support.vllm_server import VLLM
from weightwire import Follower
from weightwire.weights.source import read_weights

__all__ = ["MODEL", "SAVE", "check_serve_command", "followed", "one_step_later", "save_checkpoints"]

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


def save_checkpoints(directory: Path) -> None:
    """checkpoint-100, checkpoint-200 and checkpoint-300, as a trainer writes them."""
    training = Training(directory)
    for step in (100, 200, 300):
        training.save(f"checkpoint-{step}")


def followed(bucket: Path, into: Path) -> dict[str, bytes]:
    with Follower(bucket, into=into) as follower:
        follower.once()
        return bits_of(follower.checkpoint())


def one_step_later(model: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    weights = read_weights(model)
    changed = {name: (one.dtype.name, one.shape, one.bits.copy()) for name, one in weights.items()}
    for _, _, bits in changed.values():
        bits[::101] ^= 1
    return changed


def transfer_config(command: list[str]) -> Any:
    return json.loads(command[command.index("--weight-transfer-config") + 1])


def check_serve_command(command: str, vllm: VLLM) -> None:
    """The server of the tests runs with the options that a page shows; only its size differs."""
    words = shlex.split(command.replace("\\\n", " "))
    assert "VLLM_SERVER_DEV_MODE=1" in words
    running = [str(word) for word in vllm._command]
    assert transfer_config(words) == transfer_config(running)
    for option in words:
        assert not option.startswith("--") or option in running, option
