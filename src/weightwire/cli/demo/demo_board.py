"""What a person sees of a demo: a board that is drawn anew where someone watches, and a line per version elsewhere.

Knows the picture of a run; nothing of processes.
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
from weightwire.cli.shared.terminal import byte_size, percent, printable, say
from weightwire.demo.scenario import DemoView
from weightwire.page.run_view import ReplicaView, RunView, VersionView

__all__ = ["Lines", "beside_bytes", "board", "changed", "fifths", "full_bytes", "sent_bytes"]

_BARS = "▁▂▃▄▅▆▇█"
_PLOT = 40  # columns of plots and bars, where there is room
_TEXT = 52  # columns beside them
_SAID = 4  # lines of what has happened


# --- figures -----------------------------------------------------------------------------------------------------


def fifths(picture: RunView) -> tuple[float, float] | None:
    """The mean reward of the first and of the last fifth of all steps."""
    rewards = _rewards(picture)
    fifth = len(rewards) // 5
    return (_mean(rewards[:fifth]), _mean(rewards[-fifth:])) if fifth else None


def changed(picture: RunView) -> float | None:
    """The fraction of the weights that a step changed, on average."""
    counts = [one.changed for one in _steps(picture)]
    return _mean(counts) / picture.parameters if counts and picture.parameters else None


def sent_bytes(picture: RunView) -> int:
    """What a replica fetches that is there from the start: the first version, which is an anchor, and deltas."""
    return sum(one.nbytes for one in picture.versions)


def beside_bytes(picture: RunView) -> int:
    """Anchors beside the chain, for who comes later."""
    return sum(one.nbytes for one in picture.anchors)


def full_bytes(picture: RunView) -> int:
    """What it would have been with all weights sent for each version."""
    return sum(one.kind != FENCE for one in picture.versions) * picture.nbytes


def _steps(picture: RunView) -> list[VersionView]:
    """The versions that a step of the trainer made."""
    return [one for one in picture.versions if one.kind == DELTA]


def _rewards(picture: RunView) -> list[float]:
    rewards = (one.metrics.get("reward") for one in _steps(picture))
    return [one for one in rewards if one is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- where nobody watches ----------------------------------------------------------------------------------------


class Lines:
    """A line per version."""

    def __init__(self) -> None:
        self._shown = 0

    def say(self, text: str) -> None:
        say(text)

    def mark(self, replica: str, state: str) -> None:
        pass  # what happens to it has been said

    def show(self, picture: RunView) -> None:
        for one in picture.versions:
            if one.version > self._shown:
                self._shown = one.version
                say(_line(one, picture))


def _line(one: VersionView, picture: RunView) -> str:
    metrics = ((name, one.metrics.get(name)) for name in ("reward", "staleness"))
    parts = [
        f"version {one.version}" + ("" if one.step is None else f" (step {one.step})"),
        *(f"{name} {value:.3g}" for name, value in metrics if value is not None),
        f"{byte_size(one.nbytes)} of {byte_size(picture.nbytes)}",
        f"{percent(one.changed, picture.parameters)} changed" if one.kind == DELTA else one.kind,
        *(f"{replica.name} at {max(0, replica.reached)}{_pause(replica)}" for replica in picture.replicas),
    ]
    return ", ".join(parts)


def _pause(replica: ReplicaView) -> str:
    return "" if replica.pause is None else f" (pause {short(replica.pause)})"


# --- where someone does ------------------------------------------------------------------------------------------


class _Board:
    """Drawn anew with every look."""

    def __init__(self, live: Live, steps: int) -> None:
        self._live, self._steps = live, steps
        self._began = time.monotonic()
        self._said: list[str] = []
        self._marks: dict[str, str] = {}
        self._picture: RunView | None = None

    def say(self, text: str) -> None:
        self._said.append(f"{time.monotonic() - self._began:4.0f} s  {printable(text)}")
        self._draw()

    def mark(self, replica: str, state: str) -> None:
        self._marks[replica] = state
        self._draw()

    def show(self, picture: RunView) -> None:
        self._picture = picture
        self._draw()

    def _draw(self) -> None:
        parts: list[RenderableType] = []
        if self._picture is not None and self._picture.versions:
            width = max(8, min(_PLOT, self._live.console.width - _TEXT))
            parts += [_progress(self._picture, self._steps, width), Text(), _places(self._picture, self._marks), Text()]
        # The first says where the page is, which is worth knowing all the time.
        parts += [Text(line, style="dim") for line in self._said[:1] + self._said[1:][-_SAID:]]
        self._live.update(Group(*parts))


def _progress(picture: RunView, steps: int, width: int) -> Table:
    newest, rewards = picture.versions[-1], _rewards(picture)
    grid = _grid(width)
    done = max(one.step or 0 for one in picture.versions)
    grid.add_row("step", _bar(done, steps, width), Text(f"{done} of {steps}"))
    if rewards:
        began = f", began at {both[0]:.3f}" if (both := fifths(picture)) and len(rewards) >= 10 else ""
        grid.add_row("reward", Text(_plot(rewards, width), style="green"), Text(f"{_mean(rewards[-5:]):.3f}{began}"))
    if newest.kind == DELTA and newest.nbytes:
        grid.add_row("this delta", _bar(newest.nbytes, picture.nbytes, width), Text(_size(newest, picture)))
    sent, full = sent_bytes(picture), full_bytes(picture)
    if full:
        grid.add_row("all so far", _bar(sent, full, width), Text(f"{byte_size(sent)} of {byte_size(full)}"))
    if (stale := newest.metrics.get("staleness")) is not None:
        grid.add_row("staleness", Text(f"{stale:.1f} versions"), Text("of what is learnt from"))
    return grid


def _size(delta: VersionView, picture: RunView) -> str:
    share = percent(delta.changed, picture.parameters)
    return f"{byte_size(delta.nbytes)}, {picture.nbytes / delta.nbytes:,.0f}x smaller, {share} changed"


def _places(picture: RunView, marks: Mapping[str, str]) -> Table:
    newest = picture.versions[-1].version
    grid = _grid(16)
    grid.add_row("trainer", Text(f"version {newest}"), Text())
    for one in picture.replicas:
        behind = newest - max(0, one.reached)
        late = "" if behind <= 0 else f", {behind} behind"
        place = Text(f"version {max(0, one.reached)}{late}", style="" if behind <= 2 else "yellow")
        grid.add_row(one.name, place, _state(one, marks.get(one.name, "")))
    return grid


def _state(replica: ReplicaView, mark: str) -> Text:
    if mark or replica.trouble:
        return Text(mark or printable(replica.trouble), style="red")
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
    """As many columns as there is room for, each the mean of its share."""
    columns = min(width, len(values))
    shares = [values[at * len(values) // columns : (at + 1) * len(values) // columns] for at in range(columns)]
    means = [_mean(share) for share in shares]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


@contextmanager
def board(steps: int) -> Iterator[DemoView]:
    """On stderr, as all talk is."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield Lines()
        return
    console = Console(stderr=True, highlight=False)
    with Live(console=console, refresh_per_second=4) as live:
        yield _Board(live, steps)
