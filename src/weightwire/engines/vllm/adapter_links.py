"""The paths under which a server reads the versions of an adapter.

Each version has a path of its own, because vLLM reuses cached keys and values for an adapter of the same path. A path
stays valid when its version is replaced, and then leads to the newest one: a request that waits or runs remembers the
path, and vLLM may read the adapter again from there. If it finds nothing, the whole server dies.

    PLACE/<version>-<token> -> newest       what the server is told
    PLACE/newest -> data-<token>
    PLACE/data-<token>/                     the files of one version, as hard links
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from weightwire.engines.engine import ServedVersion
from weightwire.replica import CheckpointAbout
from weightwire.system import durable_files
from weightwire.weights import ABOUT_FILE, ADAPTER_CONFIG, ADAPTER_FILE

__all__ = ["AdapterLinks", "linked_version"]

_PLACE = "served-"
_DATA = "data-"
_NEWEST = "newest"
_KEPT = 1000  # paths: no request should run for longer than that many versions


class AdapterLinks:
    """The paths of one adapter in one server, in a directory beside the checkpoints of a replica."""

    def __init__(self, checkpoints: Path, engine: str) -> None:
        """`engine` is the engine's name: several may serve one replica."""
        self._place = checkpoints / f"{_PLACE}{hashlib.sha256(engine.encode()).hexdigest()[:16]}"

    def add(self, checkpoint: Path, version: int) -> Path:
        """A new path for the files of a checkpoint, which may be removed afterwards."""
        token = secrets.token_hex(8)
        data = self._place / f"{_DATA}{token}"
        data.mkdir(parents=True)
        for name in (ADAPTER_CONFIG, ADAPTER_FILE, ABOUT_FILE):
            try:
                os.link(checkpoint / name, data / name)
            except OSError:  # a file system without hard links
                shutil.copy(checkpoint / name, data / name)
        path = self._place / f"{version}-{token}"
        path.symlink_to(data.name)
        return path

    def remove(self, path: Path) -> None:
        """Removes a path that the server has refused, and its files."""
        durable_files.remove(self._place / os.readlink(path))
        durable_files.remove(path)

    def make_newest(self, path: Path) -> None:
        """Lets all paths lead to the files of this one. Removes other files, and the oldest paths."""
        data = os.readlink(path)
        self._point(_NEWEST, data)
        paths = sorted(self._place.glob("[0-9]*-*"), key=lambda one: one.lstat().st_mtime_ns)
        for old in paths[:-_KEPT]:
            durable_files.remove(old)
        for link in paths[-_KEPT:]:
            if os.readlink(link) != _NEWEST:
                self._point(link.name, _NEWEST)
        for one in self._place.glob(f"{_DATA}*"):
            if one.name != data:
                durable_files.remove(one)

    def _point(self, link: str, target: str) -> None:
        """Changes a link atomically. Not synced: after a power cut the server is gone as well."""
        partial = self._place / f".{link}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        os.replace(partial, self._place / link)


def linked_version(path: str) -> ServedVersion | None:
    """The version of a path that an earlier follower gave to the server; None for any other path."""
    link = Path(path)
    if not link.parent.name.startswith(_PLACE) or not link.is_symlink():
        return None
    with suppress(OSError, ValueError):
        about = CheckpointAbout.read(link)
        if link.name.partition("-")[0] == str(about.version):  # not an old path that leads to a newer version
            return ServedVersion(about.run, about.version, about.state)
    return None
