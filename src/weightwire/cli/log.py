"""`weightwire log`: the newest versions of a run, a row for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from weightwire.cli.shared.bucket_command import Url, ago, stage_time, with_bucket
from weightwire.cli.shared.terminal import AsJson, byte_size, print_rows, say, write_json
from weightwire.inspection import VersionStatus, read_history

__all__ = ["log"]

_HEADINGS = ("version", "kind", "step", "when", "bytes", "changed", "encode", "upload")
_WORDS = ("kind", "when")
_METRICS = 4  # of the trainer's, for which there is room


def log(
    url: Url,
    number: Annotated[int, typer.Option("-n", metavar="N", min=1, help="How many versions to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the newest versions of the run at URL, the newest first."""
    versions = with_bucket(url, lambda bucket: read_history(bucket, number))
    if as_json:
        write_json({"versions": msgspec.to_builtins(versions)})
        return
    if not versions:
        say("no version has been published yet")
        return
    metrics = list(dict.fromkeys(name for one in versions for name in one.metrics))[:_METRICS]
    print_rows([*_HEADINGS, *metrics], [_cells(one, metrics) for one in versions], _WORDS)


def _cells(one: VersionStatus, metrics: Sequence[str]) -> list[str]:
    return [
        str(one.version),
        one.kind,
        "-" if one.step is None else str(one.step),
        ago(time.time() - one.time),
        byte_size(one.nbytes) if one.nbytes else "-",
        f"{one.changed:,}" if one.changed else "-",
        *(stage_time(one.stages.get(stage)) for stage in ("encode", "upload")),
        *(_number(one.metrics.get(name)) for name in metrics),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
