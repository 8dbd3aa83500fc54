"""`weightwire gc`: deletes data that nothing needs any longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer

from weightwire.cli.shared.bucket_command import Url, duration, span, url_of, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.run_output import GcOutput
from weightwire.cli.shared.stop_signal import interrupt_leaves
from weightwire.cli.shared.terminal import AsJson, byte_size, counted, print_rows, say
from weightwire.system import Runtime
from weightwire.upkeep import Removal, Retention, Sweep, sweep

__all__ = ["gc"]


def gc(
    url: Url,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    keep_anchors: Annotated[
        int, typer.Option(metavar="N", min=1, help="Keep the newest N anchors and all data after them.")
    ] = Retention.anchors,
    window: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="TIME", show_default="24h", help="Keep data of versions younger than this."
        ),
    ] = Retention.window,
    grace: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="TIME", show_default="1h", help="Time between announcing a deletion and deleting."
        ),
    ] = Retention.grace,
    as_json: AsJson = False,
) -> None:
    """Delete data of the run at URL that nothing needs any longer.

    The newest version and live replicas always keep what they need. Commits are never deleted. Deletions are announced
    first: the data goes when this command runs again after the grace period. Run it about once an hour.
    """
    retention = Retention(keep_anchors, window, grace)
    deleted = 0
    with (
        interrupt_leaves(lambda: f"{counted(deleted, 'object')} deleted; run this again to delete the rest"),
        progress_bar("reading the run", unit="objects") as bar,
    ):

        def progress(done: int, total: int) -> None:
            nonlocal deleted
            if not deleted:
                bar.begin("deleting", total, "objects")
            deleted = done
            bar.set(done, total)

        swept = with_bucket(url, lambda bucket: sweep(bucket, Runtime(), retention, dry_run=dry_run, progress=progress))
    for line in _summary(swept):
        say(line)
    if as_json:
        write_json(GcOutput.of(url_of(url), swept))
    elif dry_run and swept.removed:
        rows = [(one.path, str(one.size), one.why) for one in swept.removed]
        print_rows(("path", "bytes", "why"), rows, ("path", "why"))


def _summary(swept: Sweep) -> Iterator[str]:
    did = "would delete" if swept.dry_run else "deleted"
    yield f"{did} {_sum(swept.removed)}" if swept.removed else "nothing to delete"
    for why, number in Counter(one.why.partition(":")[0] for one in swept.removed).items():
        yield f"  {number:,} {why}"
    limit = swept.limits[0]
    yield f"data from version {limit.version} on is kept: {limit.why}"
    for one in swept.damaged:
        yield f"warning: {one.path} does not count as an anchor: {one.why}"
    if swept.waiting:
        last = max(one.due or swept.now for one in swept.waiting)
        announced = "would be announced for deletion" if swept.dry_run else "will be deleted"
        yield f"{_sum(swept.waiting)} below that {announced} in {span(last - swept.now)}"


def _sum(removals: Sequence[Removal]) -> str:
    return f"{counted(len(removals), 'object')}, {byte_size(_nbytes(removals))}"


def _nbytes(removals: Iterable[Removal]) -> int:
    return sum(one.size for one in removals)
