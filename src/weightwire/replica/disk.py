"""A replica's directory on disk: folders of which one entry counts at a time, and errors that say what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightwire.errors import ReplicaError
from weightwire.system import durable_files

__all__ = ["LinkedFolder", "check_room", "explained"]

_OURS = re.compile(r"(\d+-)?[0-9a-f]{8}|\.?weightwire-.*|.*\.partial")  # what may be removed there
_NO_ROOM = "free some space, and go on"
_HINTS = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _NO_ROOM)


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


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turns errors of the system into errors that say what to do."""
    try:
        yield
    except OSError as problem:
        raise ReplicaError(
            f"{problem.filename or directory}: {problem.strerror or problem}",
            hint=_HINTS.get(problem.errno or 0, "check that the directory is on a disk that works, and may be written"),
        ) from problem


def check_room(directory: Path, needed: int) -> None:
    """A page for which there is no room any more would be a SIGBUS, and not an error."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ReplicaError(f"{directory}: {needed:,} bytes are needed, {free:,} are free", hint=_NO_ROOM)
