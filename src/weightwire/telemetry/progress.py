"""Progress of long stages, for progress bars: callbacks that count bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["ProgressCallback", "StartProgress", "ignore_progress", "start_progress"]

_log = logging.getLogger("weightwire")

ProgressCallback = Callable[[str, int, int], None]
"""Receives a stage such as "encode", the bytes done since the last call, and all its bytes. Any thread may call it."""

StartProgress = Callable[[str, int], Callable[[int], None]]
"""Announces a stage with all its bytes, and returns a function that counts the bytes done in it."""


def ignore_progress(stage: str, nbytes: int, total: int) -> None:
    pass


def start_progress(callback: ProgressCallback) -> StartProgress:
    """Exceptions of the callback are logged: a faulty progress bar must not stop publishing."""

    def report(stage: str, nbytes: int, total: int) -> None:
        try:
            callback(stage, nbytes, total)
        except Exception:
            _log.exception("a progress callback failed")

    def start(stage: str, total: int) -> Callable[[int], None]:
        report(stage, 0, total)
        return lambda nbytes: report(stage, nbytes, total)

    return start
