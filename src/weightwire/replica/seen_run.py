"""What a replica remembers of its run, beside the weights: it survives the loss of the weights.

DIR/seen.json     the run, the newest version seen, and the keys pinned on first use
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

import msgspec

from weightwire.errors import ReplicaError
from weightwire.replica.disk_errors import explained
from weightwire.system import durable_files, read_regular

__all__ = ["SeenRun"]

_FILE = "seen.json"
_HEX64 = re.compile(r"[0-9a-f]{64}")


class SeenRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`commit` is the hash of the commit of `version`; both are of the newest version seen, which may not be held."""

    run: str
    version: int
    commit: str
    change: tuple[int, str] | None = None  # version and hash of the fence that named the keys in force after it
    held: int = -1  # the newest version that the replica has held
    pinned: tuple[str, ...] = ()  # public keys

    def __post_init__(self) -> None:
        hashes = (self.commit, *self.pinned, *([] if self.change is None else [self.change[1]]))
        if not all(map(_HEX64.fullmatch, hashes)) or self.version < 0 or self.held < -1:
            raise ValueError("it is malformed")

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        path = directory / _FILE
        try:
            return msgspec.json.decode(read_regular(path), type=cls)
        except FileNotFoundError:
            return None
        # A UnicodeDecodeError is a ValueError.
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as problem:
            raise ReplicaError(
                f"{path}: cannot be read, so a bucket that was rolled back would not be noticed",
                hint="follow into a new directory",
            ) from problem

    def write(self, directory: Path) -> None:
        with explained(directory):
            durable_files.write_file(directory / _FILE, msgspec.json.encode(self))
