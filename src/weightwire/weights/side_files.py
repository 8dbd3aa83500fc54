"""Which files of a checkpoint directory are published with the weights: config and tokenizer, not trainer state."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.file_names import ABOUT_FILE

__all__ = ["LARGEST_SIDE_FILE", "named_step", "side_files"]

_TRAINERS_KINDS = {".bin", ".ckpt", ".distcp", ".log", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
_TRAINERS_OWN = {"trainer_state.json", "all_results.json", "train_results.json", "eval_results.json", "latest"}
LARGEST_SIDE_FILE = 64 << 20
"""The most bytes of a side file. Larger than any config or tokenizer."""
_STEP = re.compile(r"(?:.*?(?:checkpoint|ckpt|step|iter|update)[-_]?)?([0-9]{1,15})", re.IGNORECASE)


def side_files(checkpoint: Checkpoint, too_large: Callable[[str, int], None] | None = None) -> dict[str, Path]:
    """The names and paths of the side files that an inference server needs."""
    found: dict[str, Path] = {}
    for path in filter(_is_wanted, checkpoint.side_files):
        size = (checkpoint.path / path).stat().st_size
        if size <= LARGEST_SIDE_FILE:
            found[path.as_posix()] = checkpoint.path / path
        elif too_large:
            too_large(path.as_posix(), size)
    return found


def named_step(name: str) -> int | None:
    """The step in a directory name such as checkpoint-500."""
    named = _STEP.fullmatch(name)
    return int(named[1]) if named else None


def _is_wanted(path: Path) -> bool:
    # ABOUT_FILE describes a version that was replicated or restored, not the one to publish.
    if path.name in {*_TRAINERS_OWN, ABOUT_FILE} or path.suffix in _TRAINERS_KINDS or "tfevents" in path.name:
        return False
    if any(named_step(folder) is not None for folder in path.parts[:-1]):  # in another checkpoint below this one
        return False
    return path.as_posix().isprintable() and "\\" not in path.as_posix()
