"""The name of a follower without `--name`: kept in its replica, and bound to the directory that it was made for.

    name            the name
    name.place      the machine, the directory's inode, device and path

A copy of a replica has the name of the original. Both followers would then share one heartbeat and one lease, and `gc`
would delete what the slower one needs. So a copy takes a new name. A directory that is renamed keeps its name.
"""

from __future__ import annotations

import json
import platform
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from weightwire.chain import is_replica_name
from weightwire.system import durable_files, read_regular

__all__ = ["Place", "own_name", "renew_name"]

_MACHINE = Path("/etc/machine-id")


@dataclass(frozen=True)
class Place:
    """Where a replica is. The device has another number after some reboots, so the path counts as well."""

    machine: str
    inode: int
    device: int
    path: str

    @classmethod
    def of(cls, directory: Path) -> Self:
        found = directory.stat()
        return cls(_machine(), found.st_ino, found.st_dev, str(directory.resolve()))

    def is_same(self, other: Place) -> bool:
        """Whether both are the same directory, perhaps renamed."""
        same = (self.machine, self.inode) == (other.machine, other.inode)
        return same and (self.device == other.device or self.path == other.path)


def own_name(directory: Path, warn: Callable[[str], None]) -> str:
    """The name that is kept in a replica. A new one if there is none, or if the replica is a copy."""
    name, before, here = _read_name(directory), _read_place(directory), Place.of(directory)
    if not is_replica_name(name):  # none yet, or truncated by a power cut
        return renew_name(directory)
    if before is None:  # of an earlier release, or truncated
        _write_place(directory, here)
    elif not before.is_same(here):
        new = renew_name(directory)
        warn(f"{directory} is a copy of the replica {name}, so its name is now {new}")
        return new
    elif before != here:
        _write_place(directory, here)
    return name


def renew_name(directory: Path) -> str:
    """Gives a replica a new name."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()).strip(".-")[:60] or "replica"
    name = f"{host}-{secrets.token_hex(3)}"
    # The name first: a crash in between must not bind the old name to this place.
    durable_files.write_file(directory / "name", f"{name}\n".encode())
    _write_place(directory, Place.of(directory))
    return name


def _machine() -> str:
    with suppress(OSError, UnicodeDecodeError):
        if found := _MACHINE.read_text(encoding="ascii").strip():
            return found
    return platform.node()


def _read_name(directory: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return read_regular(directory / "name").decode("ascii").strip()
    return ""


def _read_place(directory: Path) -> Place | None:
    with suppress(OSError, ValueError, TypeError, RecursionError):
        return Place(**json.loads(read_regular(directory / "name.place")))
    return None


def _write_place(directory: Path, place: Place) -> None:
    durable_files.write_file(directory / "name.place", json.dumps(asdict(place)).encode() + b"\n")
