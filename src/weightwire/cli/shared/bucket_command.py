"""What commands on a bucket share: the URL, running a coroutine with the bucket there, times as people write them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from typing import Annotated, TypeVar

import typer

from weightwire.bucket import Bucket, open_bucket
from weightwire.chain import StageTiming
from weightwire.errors import WeightwireError

__all__ = ["Url", "ago", "check_installed", "duration", "short", "span", "stage_time", "with_bucket"]

Result = TypeVar("Result")

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The run: s3://BUCKET/PREFIX, gs://, az://, hf://, or a directory.")
]

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(s|m|min|h|d)", re.ASCII)
_MOST = 1e10  # seconds: some hundred years


def check_installed(what: str, modules: Sequence[str], extra: str) -> None:
    """What only some commands need is no part of every installation."""
    for module in modules:
        if find_spec(module) is None:
            raise WeightwireError(
                f"{what} needs {module}, which is not installed", hint=f"pip install 'weightwire[{extra}]'"
            )


def with_bucket(url: str, work: Callable[[Bucket], Awaitable[Result]]) -> Result:
    """Runs a coroutine to its end, with the bucket at a URL."""

    async def run() -> Result:
        bucket = open_bucket(url)
        try:
            return await work(bucket)
        finally:
            await bucket.close()

    return asyncio.run(run())


def duration(text: str | float) -> float:
    """Seconds: of "90s", "30min", "24h", "7d"."""
    if isinstance(text, int | float):  # the default
        return float(text)
    matched = _DURATION.fullmatch(text.strip())
    seconds = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0 if text.strip() == "0" else -1.0
    if not 0 <= seconds <= _MOST:
        raise typer.BadParameter(f"{text!r} is no time: write 90s, 30min, 24h or 7d")
    return seconds


def span(seconds: float) -> str:
    """In the largest unit that leaves a figure or two."""
    seconds = min(max(0.0, seconds), _MOST)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 0.9995 else f"{1000 * seconds:.0f} ms"


def short(seconds: float) -> str:
    """The same for what is often over within a millisecond."""
    return f"{1000 * max(0.0, seconds):.1f} ms" if seconds < 0.00995 else span(seconds)


def stage_time(stage: StageTiming | None) -> str:
    """How long a stage took, for a cell of a table."""
    return "-" if stage is None else short(stage.seconds)


def ago(seconds: float) -> str:
    return f"{span(seconds)} ago" if seconds >= 1 else "just now"
