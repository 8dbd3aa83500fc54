"""`weightwire gc`: deletes the data of versions that nobody needs any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from weightwire.cli.shared.bucket_command import Url, duration, span, with_bucket
from weightwire.cli.shared.terminal import AsJson, byte_size, counted, print_rows, say, write_json
from weightwire.system import Runtime
from weightwire.upkeep import Removal, Retention, Sweep, sweep

__all__ = ["gc"]


def gc(
    url: Url,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    keep_anchors: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many of the newest anchors to keep, with all after them.")
    ] = Retention.anchors,
    window: Annotated[
        float,
        typer.Option(parser=duration, metavar="TIME", show_default="24h", help="Keep all that is younger than this."),
    ] = Retention.window,
    grace: Annotated[
        float,
        typer.Option(parser=duration, metavar="TIME", show_default="1h", help="Between the notice and the deletion."),
    ] = Retention.grace,
    as_json: AsJson = False,
) -> None:
    """Delete what nobody needs any more from the run at URL.

    The newest version can always be reached from an anchor, and replicas that are alive can go on where they are.
    Commits are never deleted. What may go is announced first, and deleted when this is run again after the grace
    period: run it every hour or so.
    """
    retention = Retention(keep_anchors, window, grace)
    swept = with_bucket(url, lambda bucket: sweep(bucket, Runtime(), retention, dry_run=dry_run))
    for line in _summary(swept):
        say(line)
    if as_json:
        write_json({**msgspec.to_builtins(swept), "bytes": swept.nbytes})
    elif dry_run and swept.removed:
        rows = [(one.path, str(one.size), one.why) for one in swept.removed]
        print_rows(("path", "bytes", "why"), rows, ("path", "why"))


def _summary(swept: Sweep) -> Iterator[str]:
    did = "would delete" if swept.dry_run else "deleted"
    yield f"{did} {_sum(swept.removed)}" if swept.removed else "nothing to delete"
    for why, number in Counter(one.why.partition(":")[0] for one in swept.removed).items():
        yield f"  {number:,} {why}"
    limit = swept.limits[0]
    yield f"data from version {limit.version} on stays: {limit.why}"
    if swept.waiting:
        last = max(one.due or swept.now for one in swept.waiting)
        announced = "would be announced, to go" if swept.dry_run else "goes"
        yield f"{_sum(swept.waiting)} below that {announced} in {span(last - swept.now)}"


def _sum(removals: Sequence[Removal]) -> str:
    return f"{counted(len(removals), 'object')}, {byte_size(_nbytes(removals))}"


def _nbytes(removals: Iterable[Removal]) -> int:
    return sum(one.size for one in removals)
