"""A checkpoint that may become a version: its weights, its step, and whether it was written to meanwhile."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from weightwire.cli.publish.checkpoint_watch import fingerprint
from weightwire.cli.shared.terminal import progress_bar
from weightwire.delta import digest
from weightwire.errors import CheckpointError
from weightwire.weights import Checkpoint, nbytes_of

__all__ = ["CheckpointCandidate", "TornCheckpoint"]


class TornCheckpoint(CheckpointError):
    """A checkpoint that was written to while it was read."""


class CheckpointCandidate:
    """A checkpoint that may become a version."""

    def __init__(self, path: Path, step: int | None, threads: int | None) -> None:
        self.path = path
        self.step = step
        # How the files were before they were mapped.
        self._files = fingerprint(file.path for file in Checkpoint(path).files)
        self.checkpoint = Checkpoint(path)
        self.nbytes = nbytes_of(self.checkpoint)
        self._threads = threads

    @cached_property
    def state(self) -> str:
        with progress_bar("comparing", self.nbytes) as progress:
            return digest(self.checkpoint, threads=self._threads, progress=progress).hex

    def check_whole(self) -> None:
        """That nobody has written to it: half of one checkpoint and half of another would pass every digest."""
        if fingerprint(file.path for file in self.checkpoint.files) != self._files:
            raise TornCheckpoint(
                f"{self.path}: was written to while it was read, and is not published",
                hint="publish it again when the trainer has finished writing it",
            )
