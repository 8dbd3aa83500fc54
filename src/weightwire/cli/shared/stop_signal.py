"""Ctrl-C and SIGTERM: how commands stop, and how they report the state that they leave behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from weightwire.cli.shared.terminal import say

__all__ = ["CommandInterrupted", "StopSignal", "interrupt_leaves", "output_left", "stop_on_signal"]


class CommandInterrupted(Exception):
    """Ctrl-C ended the command. The message is the state that the command leaves behind."""


@contextmanager
def interrupt_leaves(describe: Callable[[], str]) -> Iterator[None]:
    """Turns Ctrl-C into CommandInterrupted. `describe` is called when everything inside has been cleaned up."""
    try:
        yield
    except KeyboardInterrupt:
        raise CommandInterrupted(describe()) from None


def output_left(path: Path) -> Callable[[], str]:
    """Describes an output that appears all at once or not at all. Call it before the output is written."""

    def identity() -> tuple[int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    before = identity()
    return lambda: f"nothing was written to {path}" if identity() == before else f"{path} is complete"


class StopSignal(threading.Event):
    """Set by the first SIGINT or SIGTERM."""

    number: int | None = None

    def finish(self, left: str) -> None:
        """The last line of a command that runs until it is stopped. After Ctrl-C the exit code is 130."""
        if self.number == signal.SIGINT:
            raise CommandInterrupted(left)
        say(f"stopped: {left}")


@contextmanager
def stop_on_signal() -> Iterator[StopSignal]:
    """The first signal sets the event, and the command finishes what it is doing. The second one does not wait."""
    stop = StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():
            stop.number = number
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
