"""A checkpoint to publish: its weights, its step, and whether it changed while it was read."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from weightwire.cli.publish.checkpoint_watch import fingerprint, is_shard_set
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.delta import digest
from weightwire.errors import CheckpointError
from weightwire.weights import Checkpoint, nbytes_of

__all__ = ["CheckpointCandidate", "TornCheckpoint"]

_CONFIGS = {"config.json", "adapter_config.json"}


class TornCheckpoint(CheckpointError):
    """A checkpoint that was written to while it was read."""


class CheckpointCandidate:
    """A checkpoint that may be published."""

    def __init__(self, path: Path, step: int | None, threads: int | None) -> None:
        self.path = path
        self.step = step
        # Before the files are mapped.
        self._files = fingerprint(file.path for file in Checkpoint(path).files)
        self.checkpoint = Checkpoint(path)
        _check_is_one_model(self.checkpoint)
        self.nbytes = nbytes_of(self.checkpoint)
        self._threads = threads

    @property
    def weights(self) -> int:
        return sum(tensor.count for tensor in self.checkpoint.values())

    @cached_property
    def state(self) -> str:
        with progress_bar("comparing", self.nbytes) as bar:
            return digest(self.checkpoint, threads=self._threads, progress=bar.add).hex

    def check_whole(self) -> None:
        """Raises if the files have changed: parts of two checkpoints would pass every digest."""
        if fingerprint(file.path for file in self.checkpoint.files) != self._files:
            raise TornCheckpoint(
                f"{self.path}: was written to while it was read; not published",
                hint="publish it again when the trainer has finished writing it",
            )


def _check_is_one_model(checkpoint: Checkpoint) -> None:
    """Refuses a directory of unrelated safetensors files: without an index or a config, all of them would be read."""
    names = [file.path.name for file in checkpoint.files]
    if checkpoint.index is not None or len(names) < 2 or is_shard_set(names):
        return
    if not any(path.name in _CONFIGS and len(path.parts) == 1 for path in checkpoint.side_files):
        raise CheckpointError(
            f"{checkpoint.path}: holds {len(names)} safetensors files, but neither an index nor a config.json",
            hint="publish one of the files, or a checkpoint directory",
        )
