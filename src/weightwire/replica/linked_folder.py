"""A folder with one current entry, which a link points to."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from weightwire.errors import ReplicaError
from weightwire.system import durable_files

__all__ = ["LinkedFolder"]

_OURS = re.compile(r"(\d+-)?[0-9a-f]{8}|\.?weightwire-.*|.*\.partial")  # entries that `tidy` may remove


class LinkedFolder:
    """DIR/name -> folder/ENTRY: the link points to the current entry. `tidy` removes the others."""

    def __init__(self, link: Path, folder: str) -> None:
        self.link = link
        self.folder = link.parent / folder

    @property
    def target(self) -> str | None:
        """The name of the current entry. None if there is none, or if a link leads out of the folder."""
        if not self.link.is_symlink():
            return None
        folder, name = os.path.split(os.readlink(self.link))
        is_inside = folder == self.folder.name and name not in ("", ".", "..") and not (self.folder / name).is_symlink()
        return name if is_inside else None

    def point(self, entry: Path) -> None:
        """Points the link to another entry, atomically."""
        durable_files.point(self.link, f"{self.folder.name}/{entry.name}")

    def recover(self) -> None:
        """Removes leftovers of a crash. Raises ReplicaError if that could remove files of somebody else."""
        if self.folder.is_symlink():
            raise ReplicaError(f"{self.folder}: a symbolic link", hint="remove the link, or use a new directory")
        durable_files.remove(self.link.with_name(f"{self.link.name}.partial"))
        self.tidy()

    def tidy(self, kept: Collection[str] = ()) -> None:
        """Removes all entries except the current one and `kept`. Skips entries that cannot be removed."""
        target = self.target
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name != target and path.name not in kept and _OURS.fullmatch(path.name):
                    durable_files.remove(path)
