"""The progress bar on stderr: bytes, rate and time left. Drawn on a terminal only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from weightwire.cli.shared.terminal import byte_size, drawing_on, stderr_console

__all__ = ["ProgressBar", "StageBar", "progress_bar"]


class ProgressBar:
    """A bar that goes through one or more phases. Without a `display` nothing is shown. Any thread may call it."""

    def __init__(self, display: Progress | None = None) -> None:
        self._display = display
        self._task: TaskID | None = None
        self._lock = threading.Lock()  # a late call must not advance a phase that has ended

    def begin(self, doing: str, total: int | None = None, unit: str = "bytes") -> None:
        """Starts a phase over `total` bytes, or objects; without a total the bar only moves."""
        if self._display is None:
            return
        with self._lock:
            if self._task is not None:
                self._display.remove_task(self._task)
            self._task = self._display.add_task(doing, total=total or None, unit=unit)

    def add(self, count: int) -> None:
        """Adds to the amount done."""
        if self._display is None:
            return
        with self._lock:
            if self._task is not None:
                self._display.advance(self._task, count)

    def set(self, done: int, total: int) -> None:
        """Sets the amount done and the total, which may grow."""
        if self._display is None:
            return
        with self._lock:
            if self._task is not None:
                self._display.update(self._task, completed=done, total=total)


@contextmanager
def progress_bar(doing: str, total: int | None = None, unit: str = "bytes") -> Iterator[ProgressBar]:
    """Shows a bar while the block runs, and removes it at the end."""
    console = stderr_console()
    # Rich also takes FORCE_COLOR for a terminal, and would fill a log with bars.
    if not console.file.isatty():
        yield ProgressBar()
        return
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        _Amount(),
        _Rate(),
        _TimeLeft(),
    ]
    with Progress(*columns, console=console, transient=True) as display, drawing_on(display.console):
        bar = ProgressBar(display)
        bar.begin(doing, total, unit)
        yield bar


class _Amount(ProgressColumn):
    """What is done of the total: "1.2 of 2.0 GB"."""

    def render(self, task: Task) -> Text:
        if task.total is None and not task.completed:
            return Text()
        if task.fields["unit"] != "bytes":
            return Text(f"{task.completed:,.0f} of {task.total or 0:,.0f} {task.fields['unit']}")
        done = byte_size(int(task.completed))
        return Text(done if task.total is None else f"{done} of {byte_size(int(task.total))}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None or not task.completed:
            return Text()
        return Text(f"{byte_size(int(speed))}/s" if task.fields["unit"] == "bytes" else f"{speed:,.0f}/s")


class _TimeLeft(ProgressColumn):
    """The time left; where that is unknown, the time that has passed."""

    max_refresh = 0.5
    _elapsed = TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        if task.total is None or task.time_remaining is None or task.finished:
            return self._elapsed.render(task)
        minutes, seconds = divmod(int(task.time_remaining), 60)
        return Text(f"{minutes}:{seconds:02} left")


_PHASES = {
    "fetch": "fetching",
    "apply": "applying",
    "verify": "comparing",
    "read": "reading",
    "encode": "encoding",
    "hash": "hashing",
}


class StageBar:
    """The `on_progress` of a publisher or follower: fills `bar`, with a phase for each stage."""

    def __init__(self, bar: ProgressBar | None = None) -> None:
        self.bar = bar or ProgressBar()

    def __call__(self, stage: str, nbytes: int, total: int) -> None:
        if nbytes:
            self.bar.add(nbytes)
        elif total:
            self.bar.begin(_PHASES[stage], total)
