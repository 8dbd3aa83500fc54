"""Folders of a replica's directory of which one entry counts at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from weightwire.system import durable_files

__all__ = ["LinkedFolder"]

_OURS = re.compile(r"(\d+-)?[0-9a-f]{8}|\.?weightwire-.*|.*\.partial")  # what may be removed there


class LinkedFolder:
    """DIR/name -> folder/ENTRY: a link that leads to one entry of a folder. Other entries are removed by `tidy`."""

    def __init__(self, link: Path, folder: str) -> None:
        self.link = link
        self.folder = link.parent / folder

    @property
    def target(self) -> str | None:
        """The name of the entry that the link leads to."""
        return os.path.basename(os.readlink(self.link)) if self.link.is_symlink() else None

    def point(self, entry: Path) -> None:
        """Makes the link lead to another entry, all at once."""
        durable_files.point(self.link, f"{self.folder.name}/{entry.name}")

    def recover(self) -> None:
        """Removes what a crash left."""
        durable_files.remove(self.link.with_name(f"{self.link.name}.partial"))
        self.tidy()

    def tidy(self, kept: Collection[str] = ()) -> None:
        """Removes all entries but the one that counts, and those to be kept. What cannot be removed now is left."""
        target = self.target
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name != target and path.name not in kept and _OURS.fullmatch(path.name):
                    durable_files.remove(path)
