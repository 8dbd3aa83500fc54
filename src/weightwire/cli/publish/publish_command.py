"""`weightwire publish`: publishes a checkpoint directory, or with --watch each one that is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event as Stop
from typing import Annotated

import typer

from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate, TornCheckpoint
from weightwire.cli.publish.checkpoint_watch import CheckpointWatch, FinishedCheckpoint, step_of
from weightwire.cli.publish.run_publisher import PublishOptions, RunPublisher
from weightwire.cli.shared.bucket_command import Url
from weightwire.cli.shared.json_output import JsonOutput, warn_as_json, write_json, write_json_line
from weightwire.cli.shared.stop_signal import interrupt_leaves, stop_on_signal
from weightwire.cli.shared.terminal import AsJson, Threads, note_if_slow, say, warn
from weightwire.cli.shared.trust_options import KeyFile, Trusted
from weightwire.errors import BucketError, CheckpointError, SchemaChanged, Unavailable
from weightwire.weights import INCOMPLETE

__all__ = ["publish"]

WarnUser = Callable[[str, str | None], None]

_POLL = 1.0  # seconds between two scans of the directory
_RETRY = 15.0  # seconds after a failure of the bucket


def publish(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory or a safetensors file.")],
    url: Url,
    watch: Annotated[
        bool, typer.Option("--watch", help="Publish each new checkpoint in or below DIR, until Ctrl-C.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, show_default="from the name of DIR", help="The training step."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Start a new run from this checkpoint, which followers already have."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Where followers find the base, if not at the same path.")
    ] = None,
    anchor_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default="by size", help="Publish an anchor every N versions."),
    ] = None,
    insist: Annotated[
        bool,
        typer.Option("--insist", help="Use a store without atomic create. Make sure that only one publisher runs."),
    ] = False,
    key: KeyFile = None,
    trust: Trusted = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Publish the weights in DIR as the next version of the run at URL.

    Starts the run if it does not exist. Otherwise it takes the run over: a trainer that publishes there is locked out,
    so stop it first. Weights that are already the newest version are not published again. To repair a run with damaged
    data, publish its newest weights with --anchor-every 1. The published files are kept in .weightwire beside DIR, as
    hard links, so that the next publish does not download them.
    """
    if source is not None and base is None:
        raise typer.BadParameter("needs --base", param_hint="--source")
    if watch and step is not None:
        raise typer.BadParameter(
            "cannot be used with --watch, which takes the step from each checkpoint", param_hint="--step"
        )
    note_if_slow()
    write = (write_json_line if watch else write_json) if as_json else _write_nothing
    warn_user = warn_as_json if as_json and watch else warn
    options = PublishOptions(url, base, source, anchor_every, insist, key, trust, threads)
    publisher = RunPublisher(options, write, warn_user)
    with interrupt_leaves(lambda: publisher.left):
        if watch:
            _watch(publisher, directory, warn_user)
        else:
            _publish_one(publisher, directory, step)


def _publish_one(publisher: RunPublisher, directory: Path, step: int | None) -> None:
    candidate = CheckpointCandidate(
        directory, step if step is not None else step_of(directory), publisher.options.threads
    )
    publisher.find()
    publisher.check(candidate)
    parent = _cache_parent(directory)
    # Before the run is taken over: repeating the command must not add a version, not even a fence.
    if publisher.needs(candidate):
        with publisher:
            publisher.open(parent, candidate)
            if publisher.needs(candidate):  # it may be the base
                publisher.publish(candidate, parent)
                return
    publisher.tell_newest(candidate)


def _cache_parent(directory: Path) -> Path:
    """Where .weightwire goes: beside DIR, or into DIR if that is the working directory."""
    place = directory.resolve()
    return place if place == Path.cwd() else place.parent


# --- watching ----------------------------------------------------------------------------------------------------


def _watch(publisher: RunPublisher, parent: Path, warn_user: WarnUser) -> None:
    watch = CheckpointWatch(parent)
    if not parent.exists():
        say(f"{parent} does not exist yet: waiting for it")
    publisher.find()
    last = publisher.found.last if publisher.found else None
    if last is not None:
        watch.mark_old_done(last.step, last.time)
    with stop_on_signal() as stop, publisher:
        if publisher.found is not None or publisher.options.base is not None:
            publisher.open(parent, None)
        say(f"watching {parent}, publishing to {publisher.where}")
        while not stop.wait(_POLL):
            for finished in watch.finished():
                if stop.is_set() or not _publish_finished(publisher, watch, finished, parent, stop, warn_user):
                    break
    stop.finish(publisher.left)


def _publish_finished(
    publisher: RunPublisher,
    watch: CheckpointWatch,
    finished: FinishedCheckpoint,
    parent: Path,
    stop: Stop,
    warn_user: WarnUser,
) -> bool:
    """Returns whether to continue with the next checkpoint."""
    try:
        candidate = CheckpointCandidate(finished.path, finished.step, publisher.options.threads)
        publisher.check(candidate)
        publisher.open(parent, candidate)
        if not publisher.has(candidate):
            publisher.publish(candidate, parent)
    except TornCheckpoint:
        return True  # it returns once it is complete
    except (CheckpointError, SchemaChanged) as problem:
        if problem.hint == INCOMPLETE:
            warn_user(f"{problem.message}; incomplete so far: waiting for it to change", None)
        else:
            warn_user(f"skipped: {problem.message}", problem.hint)
    except BucketError as problem:
        # A permanent error while opening the run ends the command.
        if not publisher.is_open and not isinstance(problem, Unavailable):
            raise
        warn_user(f"{finished.path}: not published yet ({problem.message})", problem.hint)
        stop.wait(_RETRY)
        return False
    watch.mark_done(finished)
    return True


def _write_nothing(value: JsonOutput) -> None:
    pass
