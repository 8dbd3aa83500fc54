"""The weights that were published last, kept beside the checkpoints of a trainer.

    PARENT/.weightwire/<run>/<state>/0.safetensors...   hard links to the files, or copies
                                     published.json     which version of which run this was

A publisher that starts again needs them for its next diff; without them it fetches them from the bucket. A trainer may
overwrite or delete its checkpoints at any time, also through a hard link: nothing here is believed before its digest is
checked, which is what the publisher does with `published=`. So this never fails: at worst there is nothing.

Knows files; no bucket.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from weightwire.errors import WeightwireError
from weightwire.system import durable_files
from weightwire.weights import Checkpoint

__all__ = ["load", "store"]

_FOLDER, _ABOUT = ".weightwire", "published.json"
# Links hold the space of files that the trainer has deleted: those of a run that is over must go at some time.
_FORGOTTEN = 7 * 86400.0


def load(parent: Path, run: str, state: str) -> Checkpoint | None:
    """What was stored for this state of this run. Whether it still has that state is for the caller to check."""
    place = parent / _FOLDER / run / state
    try:
        about = json.loads((place / _ABOUT).read_bytes())
        return Checkpoint(place) if (about["run"], about["state"]) == (run, state) else None
    except (OSError, ValueError, LookupError, TypeError, WeightwireError):
        return None


def store(parent: Path, run: str, state: str, version: int, checkpoint: Checkpoint) -> bool:
    """Keeps the files of a checkpoint that has been published, in place of what was kept for its run before."""
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
            durable_files.remove(folder / state)  # of the same name, but perhaps no longer of the same content
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
    """A link, which takes no space; where there can be none, a copy."""
    try:
        os.link(os.path.realpath(source), copy)
    except OSError:
        durable_files.clone_file(source, copy)


def _tidy(folder: Path, state: str) -> None:
    """Removes all but this state, and what was kept for runs that nobody has published to for days."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != state:
                durable_files.remove(path)
        for path in folder.parent.iterdir():
            if path.is_dir() and path != folder and time.time() - path.stat().st_mtime > _FORGOTTEN:
                durable_files.remove(path)
