"""`weightwire publish`: a checkpoint directory -> the next version of a run; with --watch, each that is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event as Stop
from typing import Annotated, Any

import typer

from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate, TornCheckpoint
from weightwire.cli.publish.checkpoint_watch import CheckpointWatch, FinishedCheckpoint, step_of
from weightwire.cli.publish.run_publisher import PublishOptions, RunPublisher
from weightwire.cli.shared.stop_signal import stop_on_signal
from weightwire.cli.shared.terminal import AsJson, Threads, note_if_slow, say, warn, write_json, write_json_line
from weightwire.errors import BucketError, CheckpointError, SchemaChanged, Unavailable

__all__ = ["publish"]

_LOOK = 1.0  # seconds between two looks at the directory
_AGAIN = 15.0  # seconds after a bucket has failed


def publish(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory, or a safetensors file.")],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The run: s3://BUCKET/PREFIX, another bucket, a directory.")
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Publish each checkpoint that is written in or below DIR, until Ctrl-C.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, show_default="by the name of DIR", help="The trainer's step."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The checkpoint that a new run starts from, if followers have it already."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Where followers get the base, if not at the same path.")
    ] = None,
    anchor_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default="as they pay", help="Versions between anchors."),
    ] = None,
    insist: Annotated[
        bool, typer.Option("--insist", help="Use a bucket that cannot tell two publishers apart: be the only one.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Publish the weights in DIR as the next version of the run at URL.

    A run that is not there yet is started. Weights that are the newest version already are not published again, unless
    --anchor-every 1 asks for an anchor that the run lacks: that heals a run whose data was damaged. What is published
    is also kept in .weightwire beside DIR, by hard links, to save fetching it the next time.
    """
    if source is not None and base is None:
        raise typer.BadParameter("is of use only with --base", param_hint="--source")
    if watch and step is not None:
        raise typer.BadParameter("is taken from each checkpoint with --watch", param_hint="--step")
    note_if_slow()
    write = (write_json_line if watch else write_json) if as_json else _write_nothing
    publisher = RunPublisher(PublishOptions(url, base, source, anchor_every, insist, threads), write)
    if watch:
        _watch(publisher, directory)
    else:
        _publish_one(publisher, directory, step)


def _publish_one(publisher: RunPublisher, directory: Path, step: int | None) -> None:
    candidate = CheckpointCandidate(
        directory, step if step is not None else step_of(directory), publisher.options.threads
    )
    publisher.find()
    publisher.check(candidate)
    parent = directory.resolve().parent
    # Before the run is taken over: a command that is only run again must not leave a version, not even a fence.
    if publisher.needs(candidate):
        with publisher:
            publisher.open(parent, candidate)
            if publisher.needs(candidate):  # it may be the base itself
                publisher.publish(candidate, parent)
                return
    publisher.tell_newest(candidate)


# --- watching ----------------------------------------------------------------------------------------------------


def _watch(publisher: RunPublisher, parent: Path) -> None:
    watch = CheckpointWatch(parent)
    publisher.find()
    last = publisher.found.last if publisher.found else None
    if last is not None:
        watch.mark_old_done(last.step, last.time)
    with stop_on_signal() as stop, publisher:
        if publisher.found is not None or publisher.options.base is not None:
            publisher.open(parent, None)
        say(f"watching {parent}, to publish to {publisher.where}")
        while not stop.wait(_LOOK):
            for finished in watch.finished():
                if stop.is_set() or not _publish_finished(publisher, watch, finished, parent, stop):
                    break


def _publish_finished(
    publisher: RunPublisher, watch: CheckpointWatch, finished: FinishedCheckpoint, parent: Path, stop: Stop
) -> bool:
    """Returns whether to go on with the next one."""
    try:
        candidate = CheckpointCandidate(finished.path, finished.step, publisher.options.threads)
        publisher.check(candidate)
        publisher.open(parent, candidate)
        if not publisher.has(candidate):
            publisher.publish(candidate, parent)
    except TornCheckpoint:
        return True  # it comes again when it has come to rest
    except (CheckpointError, SchemaChanged) as problem:
        warn(f"skipped: {problem.message}", problem.hint)
    except BucketError as problem:
        # What kept it from opening the run, and does not pass, is for people.
        if not publisher.is_open and not isinstance(problem, Unavailable):
            raise
        warn(f"{finished.path}: not published yet ({problem.message})", problem.hint)
        stop.wait(_AGAIN)
        return False
    watch.mark_done(finished)
    return True


def _write_nothing(value: Mapping[str, Any]) -> None:
    pass
