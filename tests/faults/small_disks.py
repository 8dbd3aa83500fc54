"""Small disks that can be filled, and a /dev/shm of our own: tmpfs in a mount namespace of this process.

The namespace vanishes with the last process in it, and the mounts with it, however the processes end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SmallDisk", "mount_tmpfs", "unshare_mounts"]

_CLONE_NEWNS = 0x00020000


def unshare_mounts() -> str:
    """Moves this process to its own mount namespace. Returns why that is not possible, or an empty string.

    Call it before other threads exist: they would stay in the old one.
    """
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    made = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True)
    return made.stderr.strip() if made.returncode else ""


def mount_tmpfs(path: Path, megabytes: int) -> str:
    """Returns why that is not possible, or an empty string."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    made = subprocess.run(command, capture_output=True, text=True)
    return made.stderr.strip() if made.returncode else ""


@dataclass(frozen=True)
class SmallDisk:
    """A mounted disk. A file, the ballast, takes its space."""

    path: Path

    @property
    def replica(self) -> Path:
        return self.path / "replica"

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    def fill(self, leave: int) -> None:
        """Takes all free space but some bytes."""
        with self._ballast.open("ab") as file:
            while True:
                info = os.statvfs(self.path)
                free = info.f_bavail * info.f_frsize
                if free <= leave:
                    return
                with suppress(OSError):  # others took some of the space meanwhile
                    os.posix_fallocate(file.fileno(), file.tell(), free - leave)
                    return

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Also while it is in use. Otherwise its directory could not be removed."""
        subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True)
