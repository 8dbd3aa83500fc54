"""The output of a running demo: a live board on a terminal, a line for each version elsewhere.

Knows snapshots of a run. Knows nothing of processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightwire.chain import DELTA, FENCE
from weightwire.cli.shared.bucket_command import short
from weightwire.cli.shared.terminal import byte_size, percent, say
from weightwire.demo.scenario import DemoView
from weightwire.errors import printable
from weightwire.page.run_view import ReplicaView, RunView, VersionView

__all__ = ["Lines", "beside_bytes", "board", "changed", "fifths", "full_bytes", "sent_bytes"]

_BARS = "▁▂▃▄▅▆▇█"
_PLOT = 40  # columns of plots and bars, where there is room
_TEXT = 52  # columns beside them
_NEWEST = 4  # lines of news


# --- figures -----------------------------------------------------------------------------------------------------


def fifths(snapshot: RunView) -> tuple[float, float] | None:
    """The mean reward of the first and of the last fifth of the steps."""
    rewards = _rewards(snapshot)
    fifth = len(rewards) // 5
    return (_mean(rewards[:fifth]), _mean(rewards[-fifth:])) if fifth else None


def changed(snapshot: RunView) -> float | None:
    """The mean fraction of the weights that a step changes."""
    counts = [one.changed for one in _steps(snapshot)]
    return _mean(counts) / snapshot.parameters if counts and snapshot.parameters else None


def sent_bytes(snapshot: RunView) -> int:
    """The bytes that a replica fetches if it follows from the start: the first anchor and all deltas."""
    return sum(one.nbytes for one in snapshot.versions)


def beside_bytes(snapshot: RunView) -> int:
    """The bytes of anchors beside the chain, for late joiners."""
    return sum(one.nbytes for one in snapshot.anchors)


def full_bytes(snapshot: RunView) -> int:
    """The bytes of a full sync of every version."""
    return sum(one.kind != FENCE for one in snapshot.versions) * snapshot.nbytes


def _steps(snapshot: RunView) -> list[VersionView]:
    """The versions that training steps published."""
    return [one for one in snapshot.versions if one.kind == DELTA]


def _rewards(snapshot: RunView) -> list[float]:
    rewards = (one.metrics.get("reward") for one in _steps(snapshot))
    return [one for one in rewards if one is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- lines -------------------------------------------------------------------------------------------------------


class Lines:
    """One line for each version."""

    def __init__(self) -> None:
        self._shown = 0

    def say(self, text: str) -> None:
        say(text)

    def mark(self, replica: str, state: str) -> None:
        pass  # `say` has reported it

    def show(self, snapshot: RunView) -> None:
        for one in snapshot.versions:
            if one.version > self._shown:
                self._shown = one.version
                say(_line(one, snapshot))


def _line(one: VersionView, snapshot: RunView) -> str:
    metrics = ((name, one.metrics.get(name)) for name in ("reward", "staleness"))
    parts = [
        f"version {one.version}" + ("" if one.step is None else f" (step {one.step})"),
        *(f"{name} {value:.3g}" for name, value in metrics if value is not None),
        f"{byte_size(one.nbytes)} of {byte_size(snapshot.nbytes)}",
        f"{percent(one.changed, snapshot.parameters)} changed" if one.kind == DELTA else one.kind,
        *map(_position, snapshot.replicas),
    ]
    return ", ".join(parts)


def _position(replica: ReplicaView) -> str:
    if replica.reached < 0:
        return f"{replica.name} has no version yet"
    pause = "" if replica.pause is None else f" (pause {short(replica.pause)})"
    return f"{replica.name} at {replica.reached}{pause}"


# --- board -------------------------------------------------------------------------------------------------------


class _Board:
    """Redraws everything with each update."""

    def __init__(self, live: Live, steps: int) -> None:
        self._live, self._steps = live, steps
        self._began = time.monotonic()
        self._news: list[str] = []
        self._marks: dict[str, str] = {}
        self._snapshot: RunView | None = None

    def say(self, text: str) -> None:
        self._news.append(f"{time.monotonic() - self._began:4.0f} s  {printable(text)}")
        self._draw()

    def mark(self, replica: str, state: str) -> None:
        self._marks[replica] = state
        self._draw()

    def show(self, snapshot: RunView) -> None:
        self._snapshot = snapshot
        self._draw()

    def _draw(self) -> None:
        parts: list[RenderableType] = []
        if self._snapshot is not None and self._snapshot.versions:
            width = max(8, min(_PLOT, self._live.console.width - _TEXT))
            parts += [
                _progress(self._snapshot, self._steps, width),
                Text(),
                _places(self._snapshot, self._marks),
                Text(),
            ]
        # The first line has the URL of the page: always show it.
        parts += [Text(line, style="dim") for line in self._news[:1] + self._news[1:][-_NEWEST:]]
        self._live.update(Group(*parts))


def _progress(snapshot: RunView, steps: int, width: int) -> Table:
    newest, rewards = snapshot.versions[-1], _rewards(snapshot)
    grid = _grid(width)
    done = max(one.step or 0 for one in snapshot.versions)
    grid.add_row("step", _bar(done, steps, width), Text(f"{done} of {steps}"))
    if rewards:
        began = f", began at {both[0]:.3f}" if (both := fifths(snapshot)) and len(rewards) >= 10 else ""
        grid.add_row("reward", Text(_plot(rewards, width), style="green"), Text(f"{_mean(rewards[-5:]):.3f}{began}"))
    if newest.kind == DELTA and newest.nbytes:
        grid.add_row("this delta", _bar(newest.nbytes, snapshot.nbytes, width), Text(_size(newest, snapshot)))
    sent, full = sent_bytes(snapshot), full_bytes(snapshot)
    if full:
        grid.add_row("all so far", _bar(sent, full, width), Text(f"{byte_size(sent)} of {byte_size(full)}"))
    if (stale := newest.metrics.get("staleness")) is not None:
        grid.add_row("staleness", Text(f"{stale:.1f} versions"), Text("lag of the games that this step learned from"))
    return grid


def _size(delta: VersionView, snapshot: RunView) -> str:
    share = percent(delta.changed, snapshot.parameters)
    return f"{byte_size(delta.nbytes)}, {snapshot.nbytes / delta.nbytes:,.0f}x smaller, {share} changed"


def _places(snapshot: RunView, marks: Mapping[str, str]) -> Table:
    newest = snapshot.versions[-1].version
    grid = _grid(16)
    grid.add_row("trainer", Text(f"version {newest}"), Text())
    for one in snapshot.replicas:
        behind = newest - one.reached
        lag = "" if behind <= 0 else f", {behind} behind"
        place = "no version yet" if one.reached < 0 else f"version {one.reached}{lag}"
        grid.add_row(
            Text(printable(one.name)),
            Text(place, style="" if behind <= 2 else "yellow"),
            _state(one, marks.get(one.name, "")),
        )
    return grid


def _state(replica: ReplicaView, mark: str) -> Text:
    if mark or replica.trouble:
        return Text(printable(mark or replica.trouble), style="red")
    return Text("" if replica.pause is None else f"last pause {short(replica.pause)}")


def _bar(part: int, whole: int, width: int) -> ProgressBar:
    return ProgressBar(total=whole, completed=part, width=width)


def _grid(width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", min_width=11)
    grid.add_column(min_width=width)
    grid.add_column()
    return grid


def _plot(values: Sequence[float], width: int) -> str:
    """A bar chart of at most `width` columns. Each column is the mean of its share of the values."""
    columns = min(width, len(values))
    shares = [values[at * len(values) // columns : (at + 1) * len(values) // columns] for at in range(columns)]
    means = [_mean(share) for share in shares]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


@contextmanager
def board(steps: int) -> Iterator[DemoView]:
    """The view for this terminal. It writes to stderr."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield Lines()
        return
    console = Console(stderr=True, highlight=False)
    with Live(console=console, refresh_per_second=4) as live:
        yield _Board(live, steps)
