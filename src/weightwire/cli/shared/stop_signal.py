"""How commands that run until they are told to stop are told: Ctrl-C, or SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_on_signal"]


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that the first signal sets, so that nothing is left half done; the second one does not wait for that."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():
            stop.set()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
