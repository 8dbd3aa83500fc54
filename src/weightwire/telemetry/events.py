"""What happened: one event per stage of a version's way. The log, the metrics and the page read the same events.

Knows only the shape of an event; whoever does the work tells of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Event", "Listener", "careful", "log_event", "warning"]

_log = logging.getLogger("weightwire")


@dataclass(frozen=True)
class Event:
    """A stage that ended; or a warning (`stage` is "warning"), or the end of one ("recovered")."""

    stage: str
    version: int | None = None
    nbytes: int = 0
    seconds: float = 0.0
    at: float = 0.0  # wall clock when it ended, for people
    message: str = ""


def warning(message: str, version: int | None = None, *, at: float) -> Event:
    """Something went wrong that the program survives."""
    return Event("warning", version, at=at, message=message)


Listener = Callable[[Event], None]


def careful(listener: Listener) -> Listener:
    """The same listener, whose own faults are logged: they are no reason to lose a version."""

    def listen(event: Event) -> None:
        try:
            listener(event)
        except Exception:
            _log.exception("a listener failed")

    return listen


def log_event(event: Event) -> None:
    """The default listener: warnings as warnings, stages as debug lines."""
    if event.stage == "warning":
        _log.warning("%s", event.message)
        return
    version = "" if event.version is None else f" version {event.version}"
    _log.debug("%s%s: %d bytes, %.3f s %s", event.stage, version, event.nbytes, event.seconds, event.message)
