"""Two checkpoints in single files, the delta between them, and commands on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors.numpy

import weightwire
from support.commands import Ran

__all__ = ["COMMAND", "INDEX", "Arrays", "Files", "first_encoding", "make_weights", "run_on_terminal", "save", "step"]

Arrays = dict[str, npt.NDArray[Any]]


COMMAND = [sys.executable, "-c", "from weightwire.cli import main; main()"]


INDEX = "model.safetensors.index.json"


def make_weights() -> Arrays:
    random = np.random.default_rng(7)
    names = ["model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 2, 10))]
    weights: Arrays = {name: random.normal(0, 0.02, (64, 128)).astype(ml_dtypes.bfloat16) for name in names}
    return weights | {"norm": random.normal(1, 0.1, 128).astype(np.float32)}


def step(arrays: Arrays) -> Arrays:
    """A few bf16 weights move by one ulp, all of the norm moves, layer 0 does not change."""
    stepped = {name: array.copy() for name, array in arrays.items()}
    for name in stepped.keys() - {"model.layers.0.mlp.up_proj.weight", "norm"}:
        stepped[name].view(np.uint16).reshape(-1)[::97] += 1
    stepped["norm"] += np.float32(1e-3)
    return stepped


def save(path: Path, arrays: Arrays) -> Path:
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    return path


def first_encoding(delta: Path, name: str) -> str:
    """The encoding of the first block, from its lowest two bits."""
    begin, _ = weightwire.Delta.open(delta).byte_range(name)
    return {1: "ulp", 2: "dense", 3: "full"}[delta.read_bytes()[begin] & 3]


@dataclass(frozen=True)
class Files:
    """Two single-file checkpoints and the delta between them, in one directory."""

    here: Path
    old: Path
    new: Path
    delta: Path


def run_on_terminal(*args: str | Path) -> Ran:
    """Runs a command with stdout and stderr on separate terminals, 80 columns wide."""
    ends = [pty.openpty(), pty.openpty()]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen([*COMMAND, *args], stdout=ends[0][1], stderr=ends[1][1], env=env)
    seen = [bytearray(), bytearray()]
    readers = [
        threading.Thread(target=read_terminal, args=(main_end, into))
        for (main_end, _), into in zip(ends, seen, strict=True)
    ]
    for (_, other_end), reader in zip(ends, readers, strict=True):
        os.close(other_end)
        reader.start()
    code = process.wait(timeout=120)
    for reader in readers:
        reader.join()
    return Ran(code, *(text.decode().replace("\r\n", "\n") for text in seen))


def read_terminal(main_end: int, into: bytearray) -> None:
    with open(main_end, "rb", buffering=0) as file:
        try:
            while chunk := file.read(1 << 16):
                into += chunk
        except OSError:  # Linux: the other end was closed
            pass
