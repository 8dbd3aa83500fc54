"""The checkpoints that a replica makes: `current`, and older ones for as long as somebody loads them.

There are at most `current`, the one handed out last, those that are lent, and one that is being made.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weightwire.replica.disk import LinkedFolder
from weightwire.replica.workdir import MODEL, Workdir, to_json
from weightwire.system import durable_files

__all__ = ["ABOUT", "FILES", "CheckpointStore"]

ABOUT = "weightwire.json"
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
        return bool(self._read().get("shares_blocks"))

    def make(self, work: Workdir) -> Path:
        """Makes `current` lead to a checkpoint of what is held, which is on disk; returns where it is now."""
        folder = self._current.folder
        made = folder / f"{work.position.version}-{secrets.token_hex(4)}"
        durable_files.make_directory(folder)
        try:
            shutil.copytree(work.path / FILES, made)
            shares_blocks = durable_files.clone_file(work.path / MODEL, made / MODEL)
            durable_files.write_file(made / ABOUT, to_json(_describe(work) | {"shares_blocks": shares_blocks}))
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
        return _describe(work).items() <= self._read().items()

    def _read(self) -> dict[str, Any]:
        """What `current` says of itself; nothing if it is not one of ours."""
        try:
            about = json.loads((self._current.link / ABOUT).read_bytes())
        except (OSError, ValueError):
            return {}
        return about if isinstance(about, dict) and (self._current.link / MODEL).is_file() else {}

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


def _describe(work: Workdir) -> dict[str, Any]:
    return asdict(work.position) | {"state": work.state.hex}
