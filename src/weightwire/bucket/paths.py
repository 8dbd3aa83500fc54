"""Which paths every bucket can hold.

Knows no store, only what they have in common: a name that one of them would take for another one's, or that would
lead out of a directory, is refused for all.
"""

from __future__ import annotations

from weightwire.errors import BucketError

__all__ = ["PARTIAL", "check_path", "check_prefix", "is_path"]

PARTIAL = ".weightwire-"
"""How the names of files begin that a local bucket has not finished writing; no object may be called so."""


def check_path(path: str) -> str:
    if not is_path(path):
        raise BucketError(
            f"{path!r} cannot be the path of an object",
            hint="use plain names with / between them: none empty, '.' or '..', no backslash, no control codes",
        )
    return path


def check_prefix(prefix: str) -> str:
    """The folder that a prefix names, without its slash."""
    if not prefix:
        return ""
    if not prefix.endswith("/"):
        raise BucketError(f"{prefix!r} cannot be listed", hint='a prefix ends in /, or is "" for everything')
    return check_path(prefix[:-1])


def is_path(path: str) -> bool:
    return all(map(_is_plain, path.split("/")))


def _is_plain(name: str) -> bool:
    if name in ("", ".", "..") or name.startswith(PARTIAL):
        return False
    # Some stores take a backslash for a slash. Surrogates stand for names that are no Unicode: only files have them.
    return not any(char == "\\" or char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in name)
