"""Every error that a user can catch: what went wrong, where, and what to do next.

Every class has a `code` that stays the same from release to release, whatever its name and messages become. Knows
nothing else of weightwire; everything else may raise from here.
"""

from __future__ import annotations

from typing import ClassVar, Self

__all__ = [
    "AlreadyExists",
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
    "NoBucket",
    "NoRun",
    "NotFound",
    "OutputError",
    "PermissionDenied",
    "ProcessFailed",
    "RankFailed",
    "ReplicaError",
    "RunError",
    "SchemaChanged",
    "Truncated",
    "Unavailable",
    "UnsafeBucket",
    "UnsupportedFormat",
    "WeightwireError",
    "WrongBase",
]


class WeightwireError(Exception):
    """The root. `str()` is the message, followed by a `hint:` line where there is one."""

    code: ClassVar[str] = "WW-ERROR"  # stable: for programs, and for searching

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def reworded(self, message: str, *, hint: str | None) -> Self:
        """An error of the same class that says more."""
        return type(self)(message, hint=hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class Closed(WeightwireError):
    """A publisher or follower that was closed, and is asked for more; or closed before it had done what it was."""

    code = "WW-CLOSED"


class Interrupted(WeightwireError):
    """Work that was interrupted half way, by Ctrl-C say."""

    code = "WW-INTERRUPTED"


class CannotListen(WeightwireError):
    """An address that a server cannot listen on: it is taken, not of this machine, or not an address."""

    code = "WW-CANNOT-LISTEN"


class CheckpointError(WeightwireError):
    """Weights that cannot be read: a missing or broken file, a dtype or layout we do not take."""

    code = "WW-CHECKPOINT"


class CorruptDelta(WeightwireError):
    """A delta or anchor whose bytes contradict themselves."""

    code = "WW-CORRUPT-DELTA"


class UnsupportedFormat(WeightwireError):
    """A file written by a newer format version than this release reads."""

    code = "WW-UNSUPPORTED-FORMAT"


class WrongBase(WeightwireError):
    """A delta that was made for other weights than the ones it is applied to."""

    code = "WW-WRONG-BASE"


class OutputError(WeightwireError):
    """A result that cannot be written where it was asked for."""

    code = "WW-OUTPUT"


class BucketError(WeightwireError):
    """The bucket did not do what it was asked for."""

    code = "WW-BUCKET"


class NotFound(BucketError):
    """There is no object of this name."""

    code = "WW-NOT-FOUND"


class NoBucket(NotFound):
    """The bucket does not exist."""

    code = "WW-NO-BUCKET"


class Truncated(BucketError):
    """An object that is shorter than its record says."""

    code = "WW-TRUNCATED"


class AlreadyExists(BucketError):
    """An object that was to be created is there: another's, or one's own after a lost reply."""

    code = "WW-ALREADY-EXISTS"


class PermissionDenied(BucketError):
    """Credentials that are missing, wrong or expired, or that do not allow this."""

    code = "WW-PERMISSION-DENIED"


class Unavailable(BucketError):
    """The bucket cannot be reached, is full or failed: it may work later. What was sent may have arrived."""

    code = "WW-UNAVAILABLE"


class UnsafeBucket(BucketError):
    """A bucket that lets two writers both create the same object."""

    code = "WW-UNSAFE-BUCKET"


class RunError(WeightwireError):
    """What the bucket holds cannot be followed or continued."""

    code = "WW-RUN"


class NoRun(RunError):
    """Nothing has been published there yet."""

    code = "WW-NO-RUN"


class BrokenChain(RunError):
    """A record that is malformed, or does not follow from the one before it."""

    code = "WW-BROKEN-CHAIN"


class ForeignRun(RunError):
    """A record, or a replica, of another run."""

    code = "WW-FOREIGN-RUN"


class DataGone(RunError):
    """The data of a version is no longer in the bucket, and no anchor stands in for it."""

    code = "WW-DATA-GONE"


class Fenced(RunError):
    """Another publisher has taken over the run; this one must not go on."""

    code = "WW-FENCED"


class SchemaChanged(RunError):
    """Weights with other names, dtypes or shapes than the run has."""

    code = "WW-SCHEMA-CHANGED"


class RankFailed(WeightwireError):
    """One of the ranks that publish together is gone, or out of step with the others: none of them can go on."""

    code = "WW-RANK-FAILED"


class ProcessFailed(WeightwireError):
    """A process that was started from here has ended, or did not get ready."""

    code = "WW-PROCESS-FAILED"


class ReplicaError(WeightwireError):
    """A replica directory that cannot be used."""

    code = "WW-REPLICA"


class EngineError(WeightwireError):
    """An engine that cannot take these weights, or did not do what it was asked for."""

    code = "WW-ENGINE"


class EngineGone(EngineError):
    """An engine that cannot be reached: it may come back."""

    code = "WW-ENGINE-GONE"


def error_class(code: str) -> type[WeightwireError]:
    """The class with this code; the root, if there is none."""
    known = [one for one in globals().values() if isinstance(one, type) and issubclass(one, WeightwireError)]
    return next((one for one in known if one.code == code), WeightwireError)
