"""`weightwire verify`: checks everything that a run has in its bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from weightwire.cli.shared.bucket_command import Url, with_bucket
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    bytes_bar,
    counted,
    note_if_slow,
    printable,
    say,
    write_json,
)
from weightwire.inspection import Verification, verify_run
from weightwire.system import Runtime
from weightwire.weights import Checkpoint

__all__ = ["verify"]


def verify(
    url: Url,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the weights of every version too, in memory.")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --rebuild: the checkpoint that the run started from.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check the run at URL: the chain of its versions, and every byte of its data.

    Exits with 1 if anything is wrong, and writes a line for each problem. Nothing is changed.
    """
    if base is not None and not rebuild:
        raise typer.BadParameter("is of use only with --rebuild", param_hint="--base")
    weights = None if base is None else Checkpoint(base)
    if rebuild:
        note_if_slow()
    with bytes_bar("verifying") as progress:
        found = with_bucket(
            url,
            lambda bucket: verify_run(
                bucket, Runtime(), rebuild=rebuild, base=weights, threads=threads, progress=progress
            ),
        )
    if as_json:
        write_json({**msgspec.to_builtins(found), "fine": found.fine})
    else:
        for problem in found.problems:
            print(printable(f"{problem.path}: {problem.what}"))
    for line in _summary(found):
        say(line)
    if not found.fine:
        raise typer.Exit(1)


def _summary(found: Verification) -> Iterator[str]:
    if found.whole == found.head:
        yield f"the chain is whole up to version {found.head}, the newest" if found.head >= 0 else "no version yet"
    else:
        yield f"the chain is broken: whole up to version {found.whole} of {found.head}"
    gone = f"; {counted(found.gone, 'file')} below version {found.below} deleted by retention" if found.gone else ""
    yield f"{counted(found.files, 'file')} of data as published, {byte_size(found.nbytes)}{gone}"
    for first, last in found.rebuilt:
        yield f"weights rebuilt from version {first} to {last}, every state as committed"
    if found.compared:
        yield f"{counted(found.compared, 'anchor')} compared with what the deltas lead to"
    yield "everything is as it should be" if found.fine else f"{counted(len(found.problems), 'problem')} found"
