"""The checkpoints that a replica makes: `current`, and older ones for as long as somebody loads them.

There are at most `current`, the one handed out last, those that are lent, and one that is being made.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

from weightwire.replica.checkpoint_about import CheckpointAbout
from weightwire.replica.linked_folder import LinkedFolder
from weightwire.replica.workdir import Workdir
from weightwire.system import durable_files
from weightwire.weights import ABOUT_FILE, MODEL_FILE

__all__ = ["FILES", "CheckpointStore"]

FILES = "files"  # of a work directory: what else a checkpoint holds


class CheckpointStore:
    """`make` the newest, `hand_out` or `lend` it. Not one of them is ever changed."""

    def __init__(self, directory: Path) -> None:
        self._current = LinkedFolder(directory / "current", "checkpoints")
        self._handed_out: str | None = None  # the name of the one handed out last
        self._lent: Counter[str] = Counter()  # names, and how many have borrowed each

    def recover(self) -> None:
        """Removes all but `current`: whoever had another one is gone, or loads again."""
        self._current.recover()

    @property
    def shares_blocks(self) -> bool:
        """Whether `current` shares blocks with what it was made from."""
        about = self._read()
        return about is not None and bool(about.shares_blocks)

    def make(self, work: Workdir) -> Path:
        """Makes `current` lead to a checkpoint of what is held, which is on disk; returns where it is now."""
        folder = self._current.folder
        made = folder / f"{work.position.version}-{secrets.token_hex(4)}"
        durable_files.make_directory(folder)
        try:
            shutil.copytree(work.path / FILES, made)
            shares_blocks = durable_files.clone_file(work.path / MODEL_FILE, made / MODEL_FILE)
            durable_files.write_file(made / ABOUT_FILE, replace(_describe(work), shares_blocks=shares_blocks).to_json())
            durable_files.sync_tree(made)
            self._current.point(made)
        finally:
            self._tidy()
        return self.path

    @property
    def path(self) -> Path:
        """Where `current` leads."""
        return Path(os.path.realpath(self._current.link))

    def is_of(self, work: Workdir) -> bool:
        """Whether `current` is a checkpoint of what is held."""
        about = self._read()
        return about is not None and replace(about, shares_blocks=None) == _describe(work)

    def _read(self) -> CheckpointAbout | None:
        """What `current` says of itself; None if it is not one of ours."""
        try:
            about = CheckpointAbout.read(self._current.link)
        except (OSError, ValueError):
            return None
        return about if (self._current.link / MODEL_FILE).is_file() else None

    def hand_out(self) -> Path:
        """`current`, which stays until the next one is handed out."""
        path = self.path
        if path.name != self._handed_out:
            self._handed_out = path.name
            self._tidy()
        return path

    def lend(self) -> Path:
        """`current`, which stays until it is given back."""
        path = self.path
        self._lent[path.name] += 1
        return path

    def give_back(self, path: Path) -> None:
        self._lent[path.name] -= 1
        self._lent = +self._lent  # without those that nobody has any more
        self._tidy()

    def _tidy(self) -> None:
        self._current.tidy({*self._lent} | ({self._handed_out} if self._handed_out else set()))


def _describe(work: Workdir) -> CheckpointAbout:
    position = work.position
    return CheckpointAbout(position.run, position.version, position.commit, work.state.hex)
