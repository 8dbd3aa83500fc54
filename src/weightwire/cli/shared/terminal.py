"""Shared by all commands: options, lines on stderr, tables on stdout, and readable numbers.

Everything is readable without colour.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightwire.codec import has_kernel
from weightwire.errors import printable

__all__ = [
    "AsJson",
    "Threads",
    "byte_size",
    "counted",
    "drawing_on",
    "fail",
    "note_if_slow",
    "percent",
    "print_facts",
    "print_lines",
    "print_rows",
    "say",
    "stderr_console",
    "stdout_is_watched",
    "warn",
]

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout; see docs/json.md.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default="one per core, up to 8", help="Number of threads."),
]


_drawing: list[Console] = []


def say(text: str) -> None:
    """Writes a line to stderr."""
    stderr_console().print(Text(printable(text)), soft_wrap=True)


def warn(message: str, hint: str | None = None) -> None:
    """Writes what went wrong and is being handled."""
    say(f"warning: {message}")
    if hint:
        say(f"hint: {hint}")


def fail(message: str, hint: str | None = None, code: str = "") -> NoReturn:
    """Writes what failed and what to do next, and exits. docs/troubleshooting.md explains the code, if there is one."""
    console = stderr_console()
    line = Text.assemble(("error:", "bold red"), " ", printable(message), (f" [{code}]" if code else "", "dim"))
    console.print(line, soft_wrap=True)
    if hint:
        console.print(Text.assemble(("hint:", "bold cyan"), " ", printable(hint)), soft_wrap=True)
    sys.exit(1)


def note_if_slow() -> None:
    """Notes that the compiled kernel is missing. Everything works without it, but slowly."""
    if not has_kernel():
        say("note: the compiled kernel is missing; this is many times slower without it")
        say("hint: install a C compiler, then install weightwire again")


def stdout_is_watched() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()  # None, if it was closed before the start


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> None:
    """A table on stdout. Columns in `words` are left-aligned. Cells may be untrusted.

    On a terminal, long cells are folded. Elsewhere each row is one line, for grep, sort and awk.
    """
    if not stdout_is_watched():
        print_lines(headings, rows, words)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(Text(printable(heading)), justify="left" if heading in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table)


def print_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> None:
    """Like `print_rows`, always with one line per row."""
    lines = [[printable(heading) for heading in headings], *([printable(cell) for cell in row] for row in rows)]
    # One name may be very long: do not pad all others to it.
    widths = [min(120, max(map(len, column))) for column in zip(*lines, strict=True)]
    for line in lines:
        aligned = [
            cell.ljust(width) if heading in words else cell.rjust(width)
            for heading, cell, width in zip(headings, line, widths, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Lines of a label and a text, on stdout. Texts may be untrusted."""
    console = Console(highlight=False)
    for label, text in facts:
        console.print(Text.assemble((f"{printable(label):<10}", "bold"), " ", printable(text)), soft_wrap=True)


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def byte_size(count: int) -> str:
    """Two or three digits. 1 kB is 1000 bytes."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size >= 999.5:
            size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if size < 9.95 and unit != "B" else f"{size:.0f} {unit}"


def percent(part: int, whole: int) -> str:
    """At least two digits. Never rounds to 0% or 100%."""
    if not part or part == whole:
        return "100%" if part else "0%"
    share = 100 * part / whole
    if share < 0.01:
        return "<0.01%"
    return f"{share:.2f}%" if share < 10 else f"{min(share, 99.9):.1f}%"


def stderr_console() -> Console:
    """The console that a progress bar is drawn on, so that lines appear above the bar; otherwise a new one."""
    return _drawing[-1] if _drawing else Console(stderr=True, highlight=False)


@contextmanager
def drawing_on(console: Console) -> Iterator[None]:
    """Sends lines through the console of a progress bar while the bar is shown."""
    _drawing.append(console)
    try:
        yield
    finally:
        _drawing.remove(console)
