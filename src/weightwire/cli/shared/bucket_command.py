"""Shared by commands on a bucket: options, running a coroutine on a bucket, durations."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from weightwire.bucket import BUCKET_URLS, Bucket, MonitoredBucket, open_bucket
from weightwire.chain import StageTiming
from weightwire.cli.shared.terminal import say, warn
from weightwire.errors import MissingDependency
from weightwire.system import Runtime
from weightwire.telemetry import Event

__all__ = [
    "Base",
    "Url",
    "ago",
    "check_installed",
    "duration",
    "short",
    "span",
    "stage_time",
    "url_of",
    "warn_of_damage",
    "with_bucket",
]

Result = TypeVar("Result")

Url = Annotated[str, typer.Argument(metavar="URL", help=f"The run: {BUCKET_URLS}.")]

Base = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Base checkpoint of a run that was started with `publish --base`; it is not in the bucket."
    ),
]

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(s|m|min|h|d)", re.ASCII)
_MOST = 1e10  # seconds, about 300 years


def check_installed(what: str, modules: Sequence[str], extra: str) -> None:
    """Checks that an optional dependency of a command is installed."""
    for module in modules:
        if find_spec(module) is None:
            raise MissingDependency(
                f"{what} needs {module}, which is not installed", hint=MissingDependency.hint_for(extra)
            )


def with_bucket(url: str, work: Callable[[Bucket], Awaitable[Result]]) -> Result:
    """Runs a coroutine on the bucket at a URL."""

    async def run() -> Result:
        bucket = MonitoredBucket(open_bucket(url), Runtime(), _report)
        try:
            return await work(bucket)
        finally:
            await bucket.close()

    return asyncio.run(run())


def _report(event: Event) -> None:
    """Prints that the store does not answer, or answers again."""
    (warn if event.stage == "warning" else say)(event.message)


def url_of(url: str) -> str:
    """The URL as messages and JSON show it: a directory is an absolute path."""
    return open_bucket(url).url


def warn_of_damage(message: str) -> None:
    """Damage of a run that a command can work around."""
    warn(message, "run `weightwire verify URL` to list all damage")


def duration(text: str | float) -> float:
    """Parses "90s", "30min", "24h" or "7d" into seconds."""
    if isinstance(text, int | float):  # the default
        return float(text)
    matched = _DURATION.fullmatch(text.strip())
    seconds = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0 if text.strip() == "0" else -1.0
    if not 0 <= seconds <= _MOST:
        raise typer.BadParameter(f"{text!r} is not a duration: use 90s, 30min, 24h or 7d")
    return seconds


def span(seconds: float) -> str:
    """A duration in the largest unit that leaves at least two of it."""
    seconds = min(max(0.0, seconds), _MOST)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{1000 * seconds:.0f} ms"


def short(seconds: float) -> str:
    """Like `span`, with tenths of a millisecond."""
    return f"{1000 * max(0.0, seconds):.1f} ms" if seconds < 0.00995 else span(seconds)


def stage_time(stage: StageTiming | None) -> str:
    """The duration of a stage, for a table cell."""
    return "-" if stage is None else short(stage.seconds)


def ago(seconds: float) -> str:
    return f"{span(seconds)} ago" if seconds >= 1 else "just now"
