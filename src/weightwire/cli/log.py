"""`weightwire log`: the newest versions of a run, a row for each."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer

from weightwire.cli.running import Url, ago, span, with_bucket
from weightwire.cli.terminal import AsJson, byte_size, print_rows, say, stdout_is_watched, write_json
from weightwire.commit import Stage
from weightwire.upkeep.report import Version, history

__all__ = ["log"]

_HEADINGS = ("version", "kind", "step", "when", "bytes", "changed", "encode", "upload")
_WORDS = ("kind", "when")


def log(
    url: Url,
    number: Annotated[int, typer.Option("-n", metavar="N", min=1, help="How many versions to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the newest versions of the run at URL, the newest first."""
    versions = with_bucket(url, lambda bucket: history(bucket, number))
    if as_json:
        write_json({"versions": msgspec.to_builtins(versions)})
        return
    if not versions:
        say("no version has been published yet")
        return
    cells = _for_people if stdout_is_watched() else _exactly
    print_rows(_HEADINGS, [cells(one) for one in versions], _WORDS)


def _for_people(one: Version) -> list[str]:
    return [
        str(one.version),
        one.kind,
        "-" if one.step is None else str(one.step),
        ago(time.time() - one.time),
        byte_size(one.nbytes) if one.nbytes else "-",
        f"{one.changed:,}" if one.changed else "-",
        *(_time(one.stages.get(stage)) for stage in ("encode", "upload")),
    ]


def _exactly(one: Version) -> list[str]:
    """For other programs: nothing rounded, and no spaces within a cell."""
    return [
        str(one.version),
        one.kind,
        "-" if one.step is None else str(one.step),
        _moment(one.time),
        str(one.nbytes),
        str(one.changed),
        *(_seconds(one.stages.get(stage)) for stage in ("encode", "upload")),
    ]


def _moment(seconds: float) -> str:
    """A publisher may have written any number."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "-"


def _time(stage: Stage | None) -> str:
    return "-" if stage is None else span(stage.seconds)


def _seconds(stage: Stage | None) -> str:
    return "-" if stage is None else f"{stage.seconds:.6f}"
