"""Outputs in the making: hidden files or directories beside the output, which replace it when they are complete.

A writer that was killed leaves one behind. The next writer of the same output on this machine removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["hold_staging", "new_staging", "release_staging", "sweep_staging"]

_YOUNG = 60.0  # seconds: a writer locks what it has created within much less


def new_staging(target: Path) -> Path:
    """A free name. In the same directory: a rename is atomic only within a file system."""
    return target.parent / f"{_prefix(target)}{secrets.token_hex(8)}.partial"


def hold_staging(staging: Path) -> int | None:
    """Locks a file or directory for as long as this process lives. None where the file system has no locks."""
    descriptor = os.open(staging, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def release_staging(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def sweep_staging(target: Path) -> None:
    """Removes what killed writers of this output left behind. Skips what is locked, young, or not removable."""
    for staging in target.parent.glob(f"{_prefix(target)}*.partial"):
        with suppress(OSError):
            if time.time() - staging.lstat().st_mtime > _YOUNG and not staging.is_symlink():
                _sweep(staging)


def _sweep(staging: Path) -> None:
    lock = hold_staging(staging)
    if lock is None:  # its writer lives
        return
    try:
        if staging.is_dir():
            shutil.rmtree(staging)
        else:
            staging.unlink()
    finally:
        os.close(lock)


def _prefix(target: Path) -> str:
    """Differs between outputs, and between machines: locks may not work across a network."""
    whose = hashlib.sha256(f"{target.name}\0{platform.node()}".encode("utf-8", "surrogateescape"))
    return f".weightwire-{whose.hexdigest()[:12]}-"
