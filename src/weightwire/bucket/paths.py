"""The object paths that every bucket accepts.

Names that one store would confuse with another name, or that would lead out of a directory, are rejected everywhere.
"""

from __future__ import annotations

from weightwire.errors import BucketError

__all__ = ["PARTIAL", "check_path", "check_prefix", "is_path"]

PARTIAL = ".weightwire-"
"""Prefix of the files that a directory bucket is still writing. No object name may start with it."""


def check_path(path: str) -> str:
    if not is_path(path):
        raise BucketError(
            f"{path!r} is not a valid object path",
            hint="join plain names with /: none empty, '.' or '..', no backslash, no control characters",
        )
    return path


def check_prefix(prefix: str) -> str:
    """The folder of a prefix, without the final slash."""
    if not prefix:
        return ""
    if not prefix.endswith("/"):
        raise BucketError(f"{prefix!r} is not a valid prefix", hint='end a prefix with /, or use "" for everything')
    return check_path(prefix[:-1])


def is_path(path: str) -> bool:
    return all(map(_is_plain, path.split("/")))


def _is_plain(name: str) -> bool:
    if name in ("", ".", "..") or name.startswith(PARTIAL):
        return False
    # Some stores treat a backslash as a slash. Surrogates stand for file names that are not valid Unicode.
    return not any(char == "\\" or char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in name)
