"""Which role may do what to which objects of a run: one table, from which policies and pages are made. Pure.

To add a path, add one line to the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weightwire.chain.record_paths import ALIVE, HEAD, RUN, Folder, heartbeat_path

__all__ = ["AccessRole", "Permission", "Verb", "access_of"]


class AccessRole(StrEnum):
    """What a key is for. Readers are status, log, page, verify, restore and `gc --dry-run`."""

    PUBLISHER = "publisher"
    FOLLOWER = "follower"
    GC = "gc"
    READER = "reader"


class Verb(StrEnum):
    GET = "get"
    LIST = "list"
    CREATE = "create"  # never replaces an object
    PUT = "put"
    UPLOAD = "upload"  # a put of large data, in parts
    DELETE = "delete"


@dataclass(frozen=True)
class Permission:
    """What one role may do to the objects at a path, or below it if it ends in `/`."""

    path: str
    verbs: tuple[Verb, ...]

    @property
    def is_folder(self) -> bool:
        return self.path.endswith("/")


_ROLES = tuple(AccessRole)

# A follower gets access to its own heartbeat only, by its name. All roles list epochs/: a run without any is a run that
# does not exist yet. S3 alone does not tell, because it answers 403 for a missing object if a key may not list
# everything.
_TABLE: Mapping[str, tuple[str, str, str, str]] = {
    # path: publisher, follower, gc, reader
    RUN: ("get create", "get", "get", "get"),
    HEAD: ("get put", "get", "", "get"),
    ALIVE: ("get put", "get", "", "get"),
    Folder.FILES: ("upload", "get", "", "get list"),
    Folder.EPOCHS: ("get list create", "list", "list", "get list"),
    Folder.COMMITS: ("get create", "get", "get list", "get list"),
    Folder.SHORTCUTS: ("get list create", "get list", "get list delete", "get list"),
    Folder.DELTAS: ("get upload", "get", "list delete", "get list"),
    Folder.ANCHORS: ("get upload", "get", "get list delete", "get list"),  # gc verifies the anchors that it keeps
    Folder.GC: ("", "", "get list create", "get list"),
    Folder.REPLICAS: ("get list", "get put", "get list delete", "get list"),
    Folder.PROBE: ("get put", "", "get list put delete", "list"),
}


def access_of(role: AccessRole, names: Sequence[str] = ()) -> list[Permission]:
    """All that a role needs. `names` are the replicas whose heartbeats a follower writes; none is enough to follow."""
    found: list[Permission] = []
    for path, columns in _TABLE.items():
        verbs = tuple(map(Verb, columns[_ROLES.index(role)].split()))
        own = role is AccessRole.FOLLOWER and path == Folder.REPLICAS
        paths = [heartbeat_path(name) for name in names] if own else [str(path)]
        found += [Permission(one, verbs) for one in paths if verbs]
    return found
