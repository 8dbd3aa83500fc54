"""Where the records and files of a run are: their paths in the bucket. Pure. See docs/PROTOCOL.md."""

from __future__ import annotations

import re
from enum import StrEnum

from weightwire.bucket import PROBE_FOLDER

__all__ = [
    "ALIVE",
    "HEAD",
    "REPLICA_NAMES",
    "RUN",
    "Folder",
    "commit_path",
    "data_path",
    "epoch_path",
    "gc_path",
    "heartbeat_path",
    "is_replica_name",
    "number_of",
    "replica_name_of",
    "shortcut_version",
    "side_path",
    "version_of",
]

RUN, HEAD, ALIVE = "run.json", "HEAD.json", "alive.json"

_NUMBERED = re.compile(r"(?:commits|epochs|gc)/([0-9]{8,20})\.json")
_VERSIONED = re.compile(r"(?:deltas|anchors|shortcuts)/([0-9]{1,19})/.+")
_SHORTCUT = re.compile(r"shortcuts/([0-9]{1,19})/anchor-[0-9a-f]{16}\.json")
_HEARTBEAT = re.compile(r"replicas/([^/]+)\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Folder(StrEnum):
    """The folders of a run, as path prefixes. Beside them there are only run.json and HEAD.json."""

    ANCHORS = "anchors/"
    COMMITS = "commits/"
    DELTAS = "deltas/"
    EPOCHS = "epochs/"
    FILES = "files/"
    GC = "gc/"
    PROBE = PROBE_FOLDER
    REPLICAS = "replicas/"
    SHORTCUTS = "shortcuts/"


def commit_path(version: int) -> str:
    return f"{Folder.COMMITS}{version:020d}.json"


def epoch_path(epoch: int) -> str:
    return f"{Folder.EPOCHS}{epoch:08d}.json"


def shortcut_version(path: str) -> int | None:
    """The version in the path of a shortcut; None for any other path."""
    matched = _SHORTCUT.fullmatch(path)
    return int(matched[1]) if matched else None


def data_path(kind: str, version: int, epoch: int, rank: int, sha256: str) -> str:
    return f"{kind}s/{version}/e{epoch}-r{rank}-{sha256[:16]}.safetensors"


def side_path(name: str, sha256: str) -> str:
    return f"{Folder.FILES}{sha256[:16]}/{name.rsplit('/', 1)[-1]}"


def gc_path(below: int) -> str:
    return f"{Folder.GC}{below:020d}.json"


def number_of(path: str) -> int | None:
    """The number in the path of a commit (its version), an epoch or a gc record; None for any other path."""
    matched = _NUMBERED.fullmatch(path)
    number = int(matched[1]) if matched else -1
    return number if path in (commit_path(number), epoch_path(number), gc_path(number)) else None


def version_of(path: str) -> int | None:
    """The version in the path of a delta, an anchor or a shortcut; None for any other path."""
    matched = _VERSIONED.fullmatch(path)
    return int(matched[1]) if matched else None


REPLICA_NAMES = "use at most 100 letters, digits, '.', '_' and '-', with a letter or digit first"
"""The hint for a name that `is_replica_name` rejects."""


def is_replica_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def heartbeat_path(name: str) -> str:
    return f"{Folder.REPLICAS}{name}.json"


def replica_name_of(path: str) -> str | None:
    """The replica's name in the path of a heartbeat; None for any other path."""
    matched = _HEARTBEAT.fullmatch(path)
    return matched[1] if matched else None
