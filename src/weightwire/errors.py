"""Every error weightwire raises: what went wrong, where, and what to do next.

Knows nothing else of weightwire; everything else may raise from here.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CorruptDelta",
    "OutputError",
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
