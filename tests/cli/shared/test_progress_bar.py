"""The progress bar: phases, and nothing where stderr is not a terminal."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress, ProgressColumn

import weightwire
from weightwire.cli.shared import progress_bar as module
from weightwire.cli.shared.progress_bar import ProgressBar, StageBar, progress_bar
from weightwire.cli.shared.terminal import say

Call = tuple[str, int, int]


class TestPhases:
    @pytest.fixture
    def display(self) -> Progress:
        return Progress(console=Console(file=io.StringIO()))

    def test_a_new_phase_replaces_the_one_before(self, display: Progress) -> None:
        bar = ProgressBar(display)
        bar.begin("reading", 10)
        bar.add(4)
        bar.add(3)
        [task] = display.tasks
        assert (task.description, task.completed, task.total, task.fields["unit"]) == ("reading", 7, 10, "bytes")
        bar.begin("deleting", 3, "objects")
        [task] = display.tasks
        assert (task.description, task.completed, task.total, task.fields["unit"]) == ("deleting", 0, 3, "objects")

    @pytest.mark.parametrize("total", [None, 0])
    def test_a_phase_without_a_total_only_moves(self, display: Progress, total: int | None) -> None:
        ProgressBar(display).begin("checking", total)
        assert display.tasks[0].total is None

    def test_done_and_total_can_be_set(self, display: Progress) -> None:
        bar = ProgressBar(display)
        bar.begin("reading", 10)
        bar.set(8, 20)
        assert (display.tasks[0].completed, display.tasks[0].total) == (8, 20)

    def test_calls_before_the_first_phase_do_nothing(self, display: Progress) -> None:
        bar = ProgressBar(display)
        bar.add(1)
        bar.set(1, 2)
        assert display.tasks == []

    def test_calls_of_several_threads_do_not_overlap(self, display: Progress) -> None:
        bar = ProgressBar(display)
        bar.begin("reading", 10)
        for call in (lambda: bar.begin("writing", 10), lambda: bar.add(1), lambda: bar.set(1, 2)):
            with bar._lock:
                thread = threading.Thread(target=call)
                thread.start()
                thread.join(0.1)
                assert thread.is_alive()
            thread.join()


def task(**given: Any) -> Any:
    facts = {"total": 2000, "completed": 1200, "speed": 400.0, "finished_speed": None, "time_remaining": 65.0}
    unit = given.pop("unit", "bytes")
    return SimpleNamespace(**facts | {"finished": False, "elapsed": 3661.0, "fields": {"unit": unit}} | given)


@pytest.mark.parametrize(
    ("column", "given", "text"),
    [
        (module._Amount(), task(), "1.2 kB of 2.0 kB"),
        (module._Amount(), task(total=None), "1.2 kB"),
        (module._Amount(), task(total=None, completed=0), ""),
        (module._Amount(), task(completed=0), "0 B of 2.0 kB"),
        (module._Amount(), task(unit="objects"), "1,200 of 2,000 objects"),
        (module._Amount(), task(unit="objects", total=None), "1,200 of 0 objects"),
        (module._Rate(), task(), "400 B/s"),
        (module._Rate(), task(unit="objects", speed=1400.4), "1,400/s"),
        (module._Rate(), task(finished_speed=800.0), "800 B/s"),
        (module._Rate(), task(speed=None), ""),
        (module._Rate(), task(completed=0), ""),
        (module._TimeLeft(), task(), "1:05 left"),
        (module._TimeLeft(), task(time_remaining=59.9), "0:59 left"),
        (module._TimeLeft(), task(total=None), "1:01:01"),
        (module._TimeLeft(), task(time_remaining=None), "1:01:01"),
        (module._TimeLeft(), task(finished=True, finished_time=3.0), "0:00:03"),
    ],
)
def test_columns_show_amount_rate_and_time(column: ProgressColumn, given: Any, text: str) -> None:
    assert str(column.render(given)) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_drawn_on_a_terminal_below_messages_and_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=100)
    monkeypatch.setattr(module, "stderr_console", lambda: console)
    with progress_bar("deleting", 10, "objects") as bar:
        bar.set(4, 10)
        say("a message")
    shown = terminal.getvalue()
    assert "deleting" in shown
    assert "4 of 10 objects" in shown
    assert "a message\n" in shown
    assert "\x1b[2K" in shown[shown.rindex("deleting") :]  # erases the line


def test_amount_counts_from_the_total_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(module, "stderr_console", lambda: Console(file=terminal, force_terminal=True, width=100))
    with progress_bar("reading", 2000) as bar:
        bar.add(1200)
    assert "1.2 kB of 2.0 kB" in terminal.getvalue()


def test_force_color_does_not_draw_bars_into_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("reading", 10) as bar:
        bar.add(10)
    assert capsys.readouterr().err == ""


def test_progress_bar_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("reading", 10) as bar:
        bar.add(5)
        bar.begin("writing", 3, "objects")
        bar.set(1, 3)
    assert capsys.readouterr().err == ""


def test_stage_bar_begins_a_phase_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(ProgressBar, "begin", lambda self, doing, total: seen.append((doing, total)))
    monkeypatch.setattr(ProgressBar, "add", lambda self, count: seen.append(count))
    bar = StageBar()
    for call in (("fetch", 0, 10), ("fetch", 4, 10), ("fetch", 6, 10), ("apply", 0, 20), ("apply", 20, 20)):
        bar(*call)
    assert seen == [("fetching", 10), 4, 6, ("applying", 20), 20]


def test_stage_without_bytes_begins_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(ProgressBar, "begin", lambda self, *given: seen.append(given))
    monkeypatch.setattr(ProgressBar, "add", lambda self, *given: seen.append(given))
    StageBar()("fetch", 0, 0)
    assert seen == []


def test_stage_bar_fills_the_bar_that_it_was_given() -> None:
    given = ProgressBar()
    assert StageBar(given).bar is given


@pytest.mark.parametrize(
    ("stage", "phase"),
    [
        ("fetch", "fetching"),
        ("apply", "applying"),
        ("verify", "comparing"),
        ("read", "reading"),
        ("encode", "encoding"),
        ("hash", "hashing"),
    ],
)
def test_every_stage_of_on_progress_has_a_phase(monkeypatch: pytest.MonkeyPatch, stage: str, phase: str) -> None:
    seen: list[str] = []
    monkeypatch.setattr(ProgressBar, "begin", lambda self, doing, total: seen.append(doing))
    StageBar()(stage, 0, 1)
    assert seen == [phase]


def test_stages_of_publisher_and_follower_add_up_to_their_totals(tmp_path: Path) -> None:
    calls: list[Call] = []

    def record(stage: str, nbytes: int, total: int) -> None:
        calls.append((stage, nbytes, total))

    first, norm = np.arange(100_000, dtype=np.uint16), np.ones(7, np.float32)
    with weightwire.Publisher(tmp_path / "run", blocking=True, on_progress=record) as publisher:
        publisher.publish({"a": first, "b": norm})
        publisher.publish({"a": first[::-1].copy(), "b": norm})
    with weightwire.Follower(tmp_path / "run", into=tmp_path / "replica", on_progress=record) as follower:
        follower.once()

    announced = [index for index, (_, nbytes, _) in enumerate(calls) if nbytes == 0]
    assert {calls[index][0] for index in announced} == {"read", "encode", "hash", "fetch", "apply"}
    for begin, end in zip(announced, [*announced[1:], len(calls)], strict=True):
        stage, _, total = calls[begin]
        assert sum(nbytes for _, nbytes, _ in calls[begin:end]) == total, stage
