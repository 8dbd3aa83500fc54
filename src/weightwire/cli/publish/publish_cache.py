"""Keeps the last published weights beside the checkpoints of a trainer.

    PARENT/.weightwire/<run>/<state>/0.safetensors...   hard links to the files, or copies
                                     published.json     the run, the state and the version

The next publish needs them for its diff; without them it downloads them. A trainer may overwrite its checkpoints at any
time, also through a hard link, so the publisher checks the digest of `published=`. Nothing here raises: at worst the
cache is empty.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from weightwire.errors import WeightwireError
from weightwire.system import durable_files, read_regular
from weightwire.weights import Checkpoint

__all__ = ["load", "store"]

_FOLDER, _ABOUT = ".weightwire", "published.json"
# Links keep the space of deleted files in use, so the cache of a finished run expires.
_FORGOTTEN = 7 * 86400.0


def load(parent: Path, run: str, state: str) -> Checkpoint | None:
    """The weights stored for a state of a run. The caller must check that they still have this state."""
    place = parent / _FOLDER / run / state
    try:
        about = json.loads(read_regular(place / _ABOUT))
        return Checkpoint(place) if (about["run"], about["state"]) == (run, state) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError, WeightwireError):
        return None


def store(parent: Path, run: str, state: str, version: int, checkpoint: Checkpoint) -> bool:
    """Stores the files of a published checkpoint, and removes the previous ones of its run."""
    folder = parent / _FOLDER / run
    partial = folder / f"{secrets.token_hex(8)}.partial"
    try:
        _make_folder(folder)
        try:
            partial.mkdir()
            for index, file in enumerate(checkpoint.files):
                _keep(file.path, partial / f"{index}.safetensors")
            about = {"run": run, "state": state, "version": version}
            (partial / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
            durable_files.remove(folder / state)  # its content may have changed
            partial.rename(folder / state)
        finally:
            _tidy(folder, state)
    except OSError:
        return False
    return True


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        os.utime(folder)
        return
    folder.mkdir(parents=True)
    with suppress(FileExistsError), (folder.parent / ".gitignore").open("x") as file:
        file.write("*\n")


def _keep(source: Path, copy: Path) -> None:
    """Makes a hard link, or a copy if that fails."""
    try:
        os.link(os.path.realpath(source), copy)
    except OSError:
        durable_files.clone_file(source, copy)


def _tidy(folder: Path, state: str) -> None:
    """Removes other states of this run, and expired runs."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != state:
                durable_files.remove(path)
        for path in folder.parent.iterdir():
            if path.is_dir() and path != folder and time.time() - path.stat().st_mtime > _FORGOTTEN:
                durable_files.remove(path)
