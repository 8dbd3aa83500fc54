"""`weightwire verify`: checks everything that a run has in its bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from weightwire.cli.shared.bucket_command import Url, url_of, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.run_output import VerifyOutput
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    counted,
    note_if_slow,
    say,
)
from weightwire.cli.shared.trust_options import Trusted, trust_of
from weightwire.errors import printable
from weightwire.inspection import Verification, verify_run
from weightwire.system import Runtime
from weightwire.weights import Checkpoint

__all__ = ["verify"]


def verify(
    url: Url,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Also rebuild the weights of every version, in memory.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --rebuild: base checkpoint of a run that was started with `publish --base`."
        ),
    ] = None,
    trust: Trusted = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Check the chain of versions and all data of the run at URL.

    Writes one line per problem, and exits with 1 if there are any. Changes nothing.
    """
    if base is not None and not rebuild:
        raise typer.BadParameter("needs --rebuild", param_hint="--base")
    weights = None if base is None else Checkpoint(base)
    trusted = trust_of(trust)
    if rebuild:
        note_if_slow()
    with progress_bar("verifying") as bar:
        found = with_bucket(
            url,
            lambda bucket: verify_run(
                bucket,
                Runtime(),
                rebuild=rebuild,
                base=weights,
                trust=trusted,
                threads=threads,
                progress=bar.set,
            ),
        )
    if as_json:
        write_json(VerifyOutput.of(url_of(url), found, rebuild=rebuild, trusted=trusted is not None))
    else:
        for problem in found.problems:
            print(printable(f"{problem.path}: {problem.what}"))
    for line in _summary(found, checked=trusted is not None):
        say(line)
    if not found.fine:
        raise typer.Exit(1)


def _summary(found: Verification, checked: bool) -> Iterator[str]:
    if found.whole == found.head:
        yield f"the chain is whole up to version {found.head}, the newest" if found.head >= 0 else "no version yet"
    else:
        yield f"the chain is broken: whole up to version {found.whole} of {found.head}"
    gone = f"; {counted(found.gone, 'file')} below version {found.below} deleted by retention" if found.gone else ""
    yield f"{counted(found.files, 'data file')} intact, {byte_size(found.nbytes)}{gone}"
    for first, last in found.rebuilt:
        yield f"rebuilt versions {first} to {last}: all digests match"
    if found.compared:
        yield f"{counted(found.compared, 'anchor')} compared with the rebuilt weights"
    if found.signed and not checked:
        yield "signatures were not checked: pass --trust KEY"
    yield "no problems found" if found.fine else f"{counted(len(found.problems), 'problem')} found"
