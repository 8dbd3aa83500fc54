"""`weightwire log`: the newest versions of a run, one row each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from weightwire.chain import DELTA
from weightwire.cli.shared.bucket_command import Url, ago, stage_time, warn_of_damage, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.run_output import LogOutput
from weightwire.cli.shared.terminal import AsJson, byte_size, print_rows, say
from weightwire.inspection import VersionStatus, read_history

__all__ = ["log"]

_HEADINGS = ("version", "kind", "step", "when", "bytes", "anchor", "changed", "encode", "upload")
_WORDS = ("kind", "when")
_METRICS = 4  # columns for the trainer's metrics


def log(
    url: Url,
    number: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of versions to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the newest versions of the run at URL, the newest first.

    `anchor` is the size of an anchor that was written beside the version.
    """
    history = with_bucket(url, lambda bucket: read_history(bucket, number, warn_of_damage))
    if as_json:
        write_json(LogOutput.of(history))
        return
    versions = history.versions
    if not versions:
        say("no version has been published yet: run `weightwire publish DIR URL`")
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
        "-" if one.anchor_bytes is None else byte_size(one.anchor_bytes),
        f"{one.changed:,}" if one.kind == DELTA else "-",
        *(stage_time(one.stages.get(stage)) for stage in ("encode", "upload")),
        *(_number(one.metrics.get(name)) for name in metrics),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
