"""Which files of a checkpoint directory go along with the weights: config and tokenizer, not what is the trainer's own.

Knows names and sizes only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.file_names import ABOUT_FILE

__all__ = ["named_step", "side_files"]

_TRAINERS_KINDS = {".bin", ".ckpt", ".distcp", ".log", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
_TRAINERS_OWN = {"trainer_state.json", "all_results.json", "train_results.json", "eval_results.json", "latest"}
_LARGEST = 64 << 20  # no config and no tokenizer is
_STEP = re.compile(r"(?:.*?(?:checkpoint|ckpt|step|iter|update)[-_]?)?([0-9]{1,15})", re.IGNORECASE)


def side_files(checkpoint: Checkpoint, too_large: Callable[[str, int], None] | None = None) -> dict[str, Path]:
    """What an inference server needs besides the weights: names, and where they lie."""
    found: dict[str, Path] = {}
    for path in filter(_is_wanted, checkpoint.side_files):
        size = (checkpoint.path / path).stat().st_size
        if size <= _LARGEST:
            found[path.as_posix()] = checkpoint.path / path
        elif too_large:
            too_large(path.as_posix(), size)
    return found


def named_step(name: str) -> int | None:
    """checkpoint-500 is how trainers call the directory of step 500."""
    named = _STEP.fullmatch(name)
    return int(named[1]) if named else None


def _is_wanted(path: Path) -> bool:
    # ABOUT_FILE is of a replica, or of a version restored: what is published next is another.
    if path.name in {*_TRAINERS_OWN, ABOUT_FILE} or path.suffix in _TRAINERS_KINDS or "tfevents" in path.name:
        return False
    if any(named_step(folder) is not None for folder in path.parts[:-1]):  # another checkpoint, below this one
        return False
    return path.as_posix().isprintable() and "\\" not in path.as_posix()
