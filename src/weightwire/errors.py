"""Every error weightwire raises: what went wrong, where, and what to do next.

Knows nothing else of weightwire; everything else may raise from here.
"""

from __future__ import annotations

__all__ = [
    "AlreadyExists",
    "BrokenChain",
    "BucketError",
    "CheckpointError",
    "CorruptDelta",
    "DataGone",
    "EngineError",
    "EngineGone",
    "Fenced",
    "ForeignRun",
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

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class CheckpointError(WeightwireError):
    """Weights that cannot be read: a missing or broken file, a dtype or layout we do not take."""


class CorruptDelta(WeightwireError):
    """A delta or anchor whose bytes contradict themselves."""


class UnsupportedFormat(WeightwireError):
    """A file written by a newer format version than this release reads."""


class WrongBase(WeightwireError):
    """A delta that was made for other weights than the ones it is applied to."""


class OutputError(WeightwireError):
    """A result that cannot be written where it was asked for."""


class BucketError(WeightwireError):
    """The bucket did not do what it was asked for."""


class NotFound(BucketError):
    """No object of this name."""


class NoBucket(NotFound):
    """Not the object is missing but the whole bucket."""


class Truncated(BucketError):
    """An object that is shorter than its record says."""


class AlreadyExists(BucketError):
    """An object that was to be created is there: another's, or one's own after a lost reply."""


class PermissionDenied(BucketError):
    """Credentials that are missing, wrong or expired, or that do not allow this."""


class Unavailable(BucketError):
    """The bucket cannot be reached, is full or failed: it may work later. What was sent may have arrived."""


class UnsafeBucket(BucketError):
    """A bucket that lets two writers both create the same object."""


class RunError(WeightwireError):
    """What the bucket holds cannot be followed or continued."""


class NoRun(RunError):
    """Nothing has been published there yet."""


class BrokenChain(RunError):
    """A record that is malformed, or does not follow from the one before it."""


class ForeignRun(RunError):
    """A record, or a replica, of another run."""


class DataGone(RunError):
    """The data of a version is no longer in the bucket, and no anchor stands in for it."""


class Fenced(RunError):
    """Another publisher has taken over the run; this one must not go on."""


class SchemaChanged(RunError):
    """Weights with other names, dtypes or shapes than the run has."""


class RankFailed(WeightwireError):
    """One of the ranks that publish together is gone, or out of step with the others: none of them can go on."""


class ProcessFailed(WeightwireError):
    """A process that was started from here has ended, or did not get ready."""


class ReplicaError(WeightwireError):
    """A replica directory that cannot be used."""


class EngineError(WeightwireError):
    """An engine that cannot take these weights, or did not do what it was asked for."""


class EngineGone(EngineError):
    """An engine that cannot be reached: it may come back."""
