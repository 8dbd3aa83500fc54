"""The checkpoints of a replica: `current`, and older ones while engines load them.

There are at most `current`, the last one handed out, the lent ones, and one in the making.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

from weightwire.replica.checkpoint_about import CheckpointAbout
from weightwire.replica.current_refresh import CurrentRefresh
from weightwire.replica.linked_folder import LinkedFolder
from weightwire.replica.workdir import Workdir
from weightwire.system import durable_files
from weightwire.weights import ABOUT_FILE, ADAPTER_FILE, MODEL_FILE, weights_file_name

__all__ = ["FILES", "CheckpointStore"]

FILES = "files"  # the side files in a work directory


class CheckpointStore:
    """`make` the newest, then `hand_out` or `lend` it. Checkpoints are never changed."""

    def __init__(self, directory: Path) -> None:
        self._current = LinkedFolder(directory / "current", "checkpoints")
        self._handed_out: str | None = None  # the name of the last one handed out
        self._lent: Counter[str] = Counter()  # borrowers by name
        self._making: str | None = None  # the name of the one that is made beside the next versions

    def recover(self) -> None:
        """Removes all but `current`: other checkpoints belong to a process that has ended."""
        self._current.recover()
        if self._current.link.is_symlink() and self._current.target is None:  # nobody has verified what is there
            durable_files.remove(self._current.link)

    @property
    def shares_blocks(self) -> bool:
        """Whether `current` shares disk blocks with the work directory."""
        about = self._read()
        return about is not None and bool(about.shares_blocks)

    def make(self, work: Workdir) -> Path:
        """Makes `current` a checkpoint of the synced work directory, and returns its path."""
        made = self._name_new(work.position.version)
        self._making = None  # it is older
        try:
            shutil.copytree(work.path / FILES, made)
            shares_blocks = durable_files.clone_file(work.path / MODEL_FILE, made / weights_file_name(work.weights))
            durable_files.write_file(made / ABOUT_FILE, replace(_describe(work), shares_blocks=shares_blocks).to_json())
            durable_files.sync_tree(made)
            work.check()  # a flush that failed meanwhile may have dropped what was copied
            self._current.point(made)
        finally:
            self._tidy()
        return self.path

    def _name_new(self, version: int) -> Path:
        durable_files.make_directory(self._current.folder)
        return self._current.folder / f"{version}-{secrets.token_hex(4)}"

    def begin_beside(self, work: Workdir) -> CurrentRefresh | None:
        """What is needed to make the next `current` from this one. None if it can only be made from the weights."""
        about, saved = self._read(), work.save()
        if about is None or about.run != work.position.run or about.version < work.synced:
            return None
        made = self._name_new(work.position.version)
        self._making = made.name
        return CurrentRefresh(self.path, about, made, saved)

    def is_making(self, refresh: CurrentRefresh) -> bool:
        """False once another `current` was made instead."""
        return refresh.made.name == self._making

    def end_beside(self, refresh: CurrentRefresh, *, adopt: bool) -> None:
        """Makes it `current`, or drops it."""
        self._making = None
        try:
            if adopt:
                self._current.point(refresh.made)
        finally:
            self._tidy()

    @property
    def path(self) -> Path:
        """The directory that `current` points to."""
        return Path(os.path.realpath(self._current.link))

    def is_of(self, work: Workdir) -> bool:
        """Whether `current` holds the same version as `work`."""
        about = self._read()
        return about is not None and replace(about, shares_blocks=None) == _describe(work)

    def _read(self) -> CheckpointAbout | None:
        """The metadata of `current`, or None if it was not made by weightwire."""
        try:
            about = CheckpointAbout.read(self._current.link)
        except (OSError, ValueError):
            return None
        return about if any((self._current.link / name).is_file() for name in (MODEL_FILE, ADAPTER_FILE)) else None

    def hand_out(self) -> Path:
        """Returns `current`, which stays until the next `hand_out`."""
        path = self.path
        if path.name != self._handed_out:
            self._handed_out = path.name
            self._tidy()
        return path

    def lend(self) -> Path:
        """Returns `current`, which stays until `give_back`."""
        path = self.path
        self._lent[path.name] += 1
        return path

    def give_back(self, path: Path) -> None:
        self._lent[path.name] -= 1
        self._lent = +self._lent  # drops zero counts
        self._tidy()

    def _tidy(self) -> None:
        self._current.tidy({*self._lent, *filter(None, (self._handed_out, self._making))})


def _describe(work: Workdir) -> CheckpointAbout:
    position = work.position
    return CheckpointAbout(position.run, position.version, position.commit, work.state.hex)
