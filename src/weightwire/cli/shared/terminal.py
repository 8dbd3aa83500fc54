"""How the commands talk: options they share, lines on stderr, a progress bar, numbers for people.

Knows no weights. Everything reads well without colour. A bar is drawn only where someone is watching.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from weightwire.codec import has_kernel

__all__ = [
    "AsJson",
    "Threads",
    "byte_size",
    "bytes_bar",
    "counted",
    "fail",
    "note_if_slow",
    "percent",
    "print_facts",
    "print_lines",
    "print_rows",
    "printable",
    "progress_bar",
    "say",
    "stdout_is_watched",
    "warn",
    "write_json",
    "write_json_line",
]

AsJson = Annotated[bool, typer.Option("--json", help="Write the figures to stdout, as JSON.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default="one per core, up to 8", help="How many threads to use."),
]


def say(text: str) -> None:
    """A line of talk."""
    _stderr().print(Text(printable(text)), soft_wrap=True)


def warn(message: str, hint: str | None = None) -> None:
    """Says what went wrong and is being dealt with."""
    say(f"warning: {message}")
    if hint:
        say(f"hint: {hint}")


def fail(message: str, hint: str | None = None) -> NoReturn:
    """Says what went wrong and what to do next, and exits."""
    console = _stderr()
    console.print(Text.assemble(("error:", "bold red"), " ", printable(message)), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("hint:", "bold cyan"), " ", printable(hint)), soft_wrap=True)
    sys.exit(1)


def note_if_slow() -> None:
    """Without the compiled kernel everything works, but takes its time; nothing else would tell."""
    if not has_kernel():
        say("note: the compiled kernel is missing, which makes this many times slower")
        say("hint: install weightwire again where there is a C compiler")


def write_json(value: Mapping[str, Any]) -> None:
    """Data, on stdout."""
    print(json.dumps(value, indent=2))


def write_json_line(value: Mapping[str, Any]) -> None:
    """Data on one line of stdout, at once: for commands that go on, and for errors."""
    print(json.dumps(value), flush=True)


def stdout_is_watched() -> bool:
    """Whether a person looks at what is written, and not another program."""
    return sys.stdout.isatty()


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> None:
    """A table on stdout. `words` are the headings of what is no number. Cells may come from anywhere.

    On a terminal cells are folded so that a line fits; elsewhere each row is one line, for grep, sort and awk.
    """
    if not stdout_is_watched():
        print_lines(headings, rows, words)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table)


def print_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> None:
    """The same, one line for each row, whoever reads it."""
    lines = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    # One name may be as long as a file allows: it is no reason to pad all others.
    widths = [min(120, max(map(len, column))) for column in zip(*lines, strict=True)]
    for line in lines:
        aligned = [
            cell.ljust(width) if heading in words else cell.rjust(width)
            for heading, cell, width in zip(headings, line, widths, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Lines of a label and a text each, on stdout. Texts may come from anywhere."""
    console = Console(highlight=False)
    for label, text in facts:
        console.print(Text.assemble((f"{label:<10}", "bold"), " ", printable(text)), soft_wrap=True)


@contextmanager
def progress_bar(doing: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar that fills up over `total` bytes, or just moves without. Yields whom to tell of bytes done."""
    console = _stderr()
    # Rich itself also takes FORCE_COLOR for a terminal, and would fill a log with bars.
    if not console.file.isatty():
        yield lambda nbytes: None
        return
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), *_columns(total)]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def bytes_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work whose size shows only later. Yields whom to tell how many bytes of how many are done."""
    console = _stderr()
    if not console.file.isatty():
        yield lambda done, total: None
        return
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), *_columns(1)]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _columns(total: int | None) -> list[ProgressColumn]:
    if not total:
        return [TimeElapsedColumn()]
    return [DownloadColumn(), TransferSpeedColumn(), TextColumn("eta"), TimeRemainingColumn(compact=True)]


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def byte_size(count: int) -> str:
    """Two figures or three. 1 kB is 1000 bytes, as on disks and networks."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size >= 999.5:
            size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if size < 9.95 and unit != "B" else f"{size:.0f} {unit}"


def percent(part: int, whole: int) -> str:
    """Two figures or more; never 0% of something, nor 100% of not quite all."""
    if not part or part == whole:
        return "100%" if part else "0%"
    share = 100 * part / whole
    if share < 0.01:
        return "<0.01%"
    return f"{share:.2f}%" if share < 10 else f"{min(share, 99.9):.1f}%"


def printable(text: str) -> str:
    """Names come from files: what could move the cursor or end the line is spelled out."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
