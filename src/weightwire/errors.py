"""Every error that a user can catch. Each has a message, a hint and a `code`.

Codes never change between releases; class names and messages may. docs/troubleshooting.md has a section for each code.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self

__all__ = [
    "AlreadyExists",
    "BadKey",
    "BrokenChain",
    "BucketError",
    "CannotListen",
    "CheckpointError",
    "Closed",
    "CorruptDelta",
    "DataGone",
    "EngineError",
    "EngineGone",
    "Fenced",
    "ForeignRun",
    "Interrupted",
    "MissingDependency",
    "NoBucket",
    "NoRun",
    "NotFound",
    "NotPublished",
    "OutOfMemory",
    "OutputError",
    "PermissionDenied",
    "ProcessFailed",
    "RankFailed",
    "ReplicaError",
    "RunError",
    "SchemaChanged",
    "Stale",
    "TooLarge",
    "Truncated",
    "Unavailable",
    "UnsafeBucket",
    "UnsupportedFormat",
    "Untrusted",
    "WeightwireError",
    "WrongBase",
]


class WeightwireError(Exception):
    """The base class. Raised directly only for internal errors. `str()` is the message, then a `hint:` line."""

    code: ClassVar[str] = "WW-ERROR"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # Messages quote stores, buckets and files, and end up on terminals and in logs.
        self.message = printable(without_secrets(message))
        self.hint = None if hint is None else printable(without_secrets(hint))
        super().__init__(self.message)

    def reworded(self, message: str, *, hint: str | None) -> Self:
        """The same error with another message and hint."""
        return type(self)(message, hint=hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class Closed(WeightwireError):
    """The publisher or follower is closed, or belongs to another process."""

    code = "WW-CLOSED"


class Interrupted(WeightwireError):
    """Ctrl-C or a signal interrupted a publish."""

    code = "WW-INTERRUPTED"


class MissingDependency(WeightwireError):
    """An optional package is not installed."""

    code = "WW-MISSING-DEPENDENCY"

    @staticmethod
    def hint_for(extra: str) -> str:
        """The hint, for a package that an extra of weightwire brings."""
        return f"install weightwire with the `{extra}` extra: see docs/install.md"


class OutOfMemory(WeightwireError):
    """This machine ran out of memory."""

    code = "WW-OUT-OF-MEMORY"


class CannotListen(WeightwireError):
    """A server cannot listen on this address: it is in use, not on this machine, or malformed."""

    code = "WW-CANNOT-LISTEN"


class BadKey(WeightwireError):
    """A key file cannot be read, or is not a key of the right kind."""

    code = "WW-KEY"


class CheckpointError(WeightwireError):
    """Weights cannot be read: a file is missing or broken, or a dtype or layout is not supported."""

    code = "WW-CHECKPOINT"


class CorruptDelta(WeightwireError):
    """A delta or anchor is damaged."""

    code = "WW-CORRUPT-DELTA"


class UnsupportedFormat(WeightwireError):
    """A file or record has a newer format version than this release reads."""

    code = "WW-UNSUPPORTED-FORMAT"


class WrongBase(WeightwireError):
    """A delta does not apply to these weights: it was made for others."""

    code = "WW-WRONG-BASE"


class OutputError(WeightwireError):
    """An output file or directory cannot be written."""

    code = "WW-OUTPUT"


class BucketError(WeightwireError):
    """A URL, a bucket setting or a request to the bucket is wrong."""

    code = "WW-BUCKET"


class NotFound(BucketError):
    """The object does not exist."""

    code = "WW-NOT-FOUND"

    @classmethod
    def at(cls, where: str) -> Self:
        return cls(f"{where}: not found", hint="check the URL, or wait until it is published")


class NoBucket(NotFound):
    """The bucket does not exist."""

    code = "WW-NO-BUCKET"


class Truncated(BucketError):
    """An object is shorter than its commit says."""

    code = "WW-TRUNCATED"

    @classmethod
    def at(cls, where: str, size: int, expected: int) -> Self:
        return cls(
            f"{where}: truncated: has {size:,} bytes, at least {expected:,} were expected",
            hint="run `weightwire verify URL` to see what is damaged",
        )


class TooLarge(BucketError):
    """An object is larger than anything that belongs in its place. It was not read."""

    code = "WW-TOO-LARGE"

    @classmethod
    def at(cls, where: str, limit: int) -> Self:
        return cls(
            f"{where}: has more than {limit:,} bytes, the limit for such an object",
            hint="it was damaged or not written by weightwire: remove it, or restore it from a backup",
        )


class AlreadyExists(BucketError):
    """The object to create exists. After a lost reply it may be the caller's own."""

    code = "WW-ALREADY-EXISTS"

    @classmethod
    def at(cls, where: str) -> AlreadyExists:
        return cls(f"{where}: exists already", hint="read the object: after a lost reply it may be your own")


class PermissionDenied(BucketError):
    """Credentials are missing, wrong or expired, or do not allow this request."""

    code = "WW-PERMISSION-DENIED"


class Unavailable(BucketError):
    """The bucket cannot be reached, is full or failed. Retrying may help. The request may have succeeded."""

    code = "WW-UNAVAILABLE"


class UnsafeBucket(BucketError):
    """The bucket lets two writers create the same object."""

    code = "WW-UNSAFE-BUCKET"


class RunError(WeightwireError):
    """The run in the bucket cannot be used as requested."""

    code = "WW-RUN"


class NoRun(RunError):
    """The bucket holds no run, or no weights yet."""

    code = "WW-NO-RUN"


class BrokenChain(RunError):
    """A commit or another record is missing, malformed, or does not match the one before it."""

    code = "WW-BROKEN-CHAIN"


class ForeignRun(RunError):
    """A record or a replica belongs to another run."""

    code = "WW-FOREIGN-RUN"


class Untrusted(RunError):
    """A commit is not signed by a key that is trusted, or this publisher may not sign."""

    code = "WW-UNTRUSTED"


class Stale(RunError):
    """The publisher of a signed run has shown no sign of life for longer than allowed."""

    code = "WW-STALE"


class DataGone(RunError):
    """The data of a version has been deleted from the bucket, and no anchor replaces it."""

    code = "WW-DATA-GONE"


class Fenced(RunError):
    """Another publisher took over the run. This publisher can no longer publish."""

    code = "WW-FENCED"


class SchemaChanged(RunError):
    """The names, dtypes or shapes of the weights differ from those of the run."""

    code = "WW-SCHEMA-CHANGED"


class NotPublished(WeightwireError):
    """Nothing was published, or a version could not be. The publisher continues with the next version."""

    code = "WW-NOT-PUBLISHED"


class RankFailed(WeightwireError):
    """The ranks cannot publish together: one is gone or out of step. No rank can continue."""

    code = "WW-RANK-FAILED"


class ProcessFailed(WeightwireError):
    """A process of the demo ended early or did not become ready."""

    code = "WW-PROCESS-FAILED"


class ReplicaError(WeightwireError):
    """A replica directory cannot be used."""

    code = "WW-REPLICA"


class EngineError(WeightwireError):
    """An engine cannot serve these weights, or a request to it failed."""

    code = "WW-ENGINE"


class EngineGone(EngineError):
    """An engine cannot be reached. A follower keeps trying."""

    code = "WW-ENGINE-GONE"


def error_class(code: str) -> type[WeightwireError]:
    """The class with this code, or the base class if the code is unknown."""
    classes = [value for value in globals().values() if isinstance(value, type) and issubclass(value, WeightwireError)]
    return next((found for found in classes if found.code == code), WeightwireError)


def printable(text: str) -> str:
    """A text on one line: what could move a cursor, colour a terminal, begin a line or reverse the text is escaped.

    For every line for people: names and errors come from buckets, stores and servers.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def public_url(url: str) -> str:
    """A URL without user, password, query and fragment, which may hold secrets. Paths are unchanged."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return url.rpartition("@")[2] if _USER_AND_PASSWORD.match(url) else url
    rest = re.split("[?#]", rest, maxsplit=1)[0]
    authority, slash, path = rest.partition("/")
    # A password may hold a slash.
    if "@" in authority or not _HOST_AND_PORT.fullmatch(authority):
        authority, slash, path = rest.rpartition("@")[2].partition("/")
    return f"{scheme}://{authority}{slash}{path}"


def without_secrets(text: str) -> str:
    """A text whose URLs have no user, password and query: libraries quote the URLs that they were given."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text)) if "://" in text else text


_USER_AND_PASSWORD = re.compile(r"[^/@]*:[^/@]*@")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:@]*)(:[0-9]*)?")
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/?#\s@]*@")
_QUERY = re.compile(r"(https?://[^\s?#\"'<>()]+)\?[^\s\"'<>()]*")


def first_line(problem: Exception) -> str:
    """The first line of another library's error, for a message. Its class if it has no text."""
    return str(problem).strip().partition("\n")[0][:300] or type(problem).__name__
