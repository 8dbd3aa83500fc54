"""Events: one for each stage that a version passes. Logs, metrics and commands read the same events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from weightwire.errors import printable, without_secrets

__all__ = ["Event", "Listener", "careful", "each_listener", "log_event", "warning"]

_log = logging.getLogger("weightwire")


@dataclass(frozen=True)
class Event:
    """A stage that ended; or a warning (`stage` is "warning"), the end of one ("recovered"), or "resumed"."""

    stage: str
    version: int | None = None
    nbytes: int = 0
    seconds: float = 0.0
    at: float = 0.0  # seconds since 1970 when it ended
    message: str = ""


def warning(message: str, version: int | None = None, *, at: float) -> Event:
    """A problem that the program handles."""
    return Event("warning", version, at=at, message=without_secrets(message))


Listener = Callable[[Event], None]


def each_listener(*listeners: Listener) -> Listener:
    """Passes every event to each of them."""

    def hear(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return hear


def careful(listener: Listener) -> Listener:
    """Wraps a listener: its exceptions are logged and do not stop publishing."""

    def listen(event: Event) -> None:
        try:
            listener(event)
        except Exception:
            _log.exception("an event listener failed")

    return listen


def log_event(event: Event) -> None:
    """The default listener: logs warnings as warnings, and stages as debug lines."""
    # A hint has its own line.
    text = "\nhint: ".join(map(printable, event.message.split("\nhint: ", 1)))
    if event.stage == "warning":
        # Without any handler, logging prints only the text.
        _log.warning("%s%s", "" if _log.hasHandlers() else "weightwire: ", text)
        return
    if event.stage in ("resumed", "recovered"):
        _log.info("%s", text)
        return
    version = "" if event.version is None else f" version {event.version}"
    _log.debug("%s%s: %d bytes, %.3f s %s", event.stage, version, event.nbytes, event.seconds, text)
