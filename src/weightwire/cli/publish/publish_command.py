"""`weightwire publish`: a checkpoint directory -> the next version of a run; with --watch, each that is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event as Stop
from types import TracebackType
from typing import Annotated, Any, Self

import typer

from weightwire.bucket import Bucket, open_bucket
from weightwire.catchup import schema_of
from weightwire.chain import ANCHOR, FENCE, ChainReader, Commit, Run, read_run
from weightwire.cli.publish import publish_cache
from weightwire.cli.publish.checkpoint_watch import CheckpointWatch, FinishedCheckpoint, fingerprint, step_of
from weightwire.cli.shared.bucket_command import with_bucket
from weightwire.cli.shared.stop_signal import stop_on_signal
from weightwire.cli.shared.terminal import (
    AsJson,
    Threads,
    byte_size,
    note_if_slow,
    percent,
    progress_bar,
    say,
    write_json,
    write_json_line,
)
from weightwire.delta import digest
from weightwire.errors import BucketError, CheckpointError, NoRun, SchemaChanged, Unavailable, WeightwireError
from weightwire.publisher import Publisher
from weightwire.telemetry import Event
from weightwire.weights import Checkpoint, Dtype, schema_of_weights, side_files

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

    A run that is not there yet is started. Weights that are the newest version already are not published again. What is
    published is also kept in .weightwire beside DIR, by hard links, to save fetching it the next time.
    """
    if source is not None and base is None:
        raise typer.BadParameter("is of use only with --base", param_hint="--source")
    if watch and step is not None:
        raise typer.BadParameter("is taken from each checkpoint with --watch", param_hint="--step")
    note_if_slow()
    write = (write_json_line if watch else write_json) if as_json else _write_nothing
    desk = _Desk(url, base, source, anchor_every, insist, threads, write)
    if watch:
        _watch(desk, directory)
    else:
        _publish_one(desk, directory, step)


def _publish_one(desk: _Desk, directory: Path, step: int | None) -> None:
    candidate = _Candidate(directory, step if step is not None else step_of(directory), desk.threads)
    desk.find()
    desk.check(candidate)
    parent = directory.resolve().parent
    # Before the run is taken over: a command that is only run again must not leave a version, not even a fence.
    if not desk.has(candidate):
        with desk:
            desk.open(parent, candidate)
            if not desk.has(candidate):  # it may be the base itself
                desk.publish(candidate, parent)
                return
    desk.tell_newest(candidate)


# --- watching ----------------------------------------------------------------------------------------------------


def _watch(desk: _Desk, parent: Path) -> None:
    watch = CheckpointWatch(parent)
    desk.find()
    if desk.last is not None:
        watch.settle_old(desk.last.step, desk.last.time)
    with stop_on_signal() as stop, desk:
        if desk.run is not None or desk.base is not None:
            desk.open(parent, None)
        say(f"watching {parent}, to publish to {desk.where}")
        while not stop.wait(_LOOK):
            for finished in watch.finished():
                if stop.is_set() or not _publish_finished(desk, watch, finished, parent, stop):
                    break


def _publish_finished(
    desk: _Desk, watch: CheckpointWatch, finished: FinishedCheckpoint, parent: Path, stop: Stop
) -> bool:
    """Returns whether to go on with the next one."""
    try:
        candidate = _Candidate(finished.path, finished.step, desk.threads)
        desk.check(candidate)
        desk.open(parent, candidate)
        if not desk.has(candidate):
            desk.publish(candidate, parent)
    except _Torn:
        return True  # it comes again when it has come to rest
    except (CheckpointError, SchemaChanged) as problem:
        _warn(f"skipped: {problem.message}", problem.hint)
    except BucketError as problem:
        # What kept it from opening the run, and does not pass, is for people.
        if not desk.is_open and not isinstance(problem, Unavailable):
            raise
        _warn(f"{finished.path}: not published yet ({problem.message})", problem.hint)
        stop.wait(_AGAIN)
        return False
    watch.settle(finished)
    return True


# --- a checkpoint ------------------------------------------------------------------------------------------------


class _Torn(CheckpointError):
    """A checkpoint that was written to while it was read."""


class _Candidate:
    """A checkpoint that may become a version."""

    def __init__(self, path: Path, step: int | None, threads: int | None) -> None:
        self.path = path
        self.step = step
        # How the files were before they were mapped.
        self._files = fingerprint(file.path for file in Checkpoint(path).files)
        self.checkpoint = Checkpoint(path)
        self.nbytes = sum(tensor.nbytes for tensor in self.checkpoint.values())
        self._threads = threads

    @cached_property
    def state(self) -> str:
        with progress_bar("comparing", self.nbytes) as progress:
            return digest(self.checkpoint, threads=self._threads, progress=progress).hex

    def check_whole(self) -> None:
        """That nobody has written to it: half of one checkpoint and half of another would pass every digest."""
        if fingerprint(file.path for file in self.checkpoint.files) != self._files:
            raise _Torn(
                f"{self.path}: was written to while it was read, and is not published",
                hint="publish it again when the trainer has finished writing it",
            )


def _note_too_large(name: str, size: int) -> None:
    say(f"note: {name} ({byte_size(size)}) is left out: it is too large to be a config or a tokenizer")


# --- a run -------------------------------------------------------------------------------------------------------


class _Ear:
    """Hears of a publish, and keeps warnings until it is known whether they matter."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def __call__(self, event: Event) -> None:
        if event.stage == "warning":
            # The others may end in an error that says the same: they are told if it does not come.
            if event.message.endswith("trying again"):
                _warn(event.message)
            else:
                self._held.append(event.message)

    def speak(self) -> None:
        for message in self._held:
            _warn(message)
        self.forget()

    def forget(self) -> None:
        self._held.clear()


@dataclass
class _Desk:
    """A run, and what it takes to publish checkpoints there. Closed at the end of a `with` block."""

    url: str
    base: Path | None
    source: str | None
    anchor_every: int | None
    insist: bool
    threads: int | None
    write: Callable[[Mapping[str, Any]], None]

    def __post_init__(self) -> None:
        self.where = open_bucket(self.url).url
        self.run: Run | None = None
        self.last: Commit | None = None  # the newest commit that is no fence
        self._head: Commit | None = None
        self._ear = _Ear()
        self._publisher: Publisher | None = None
        self._failed: WeightwireError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._publisher is None:
            return
        try:
            with progress_bar("closing the run"):  # an anchor may still be on its way
                self._publisher.__exit__(kind, error, traceback)
        except WeightwireError as problem:
            if problem is not self._failed:  # else it has been told
                raise
        self._ear.speak()

    @property
    def is_open(self) -> bool:
        return self._publisher is not None

    def find(self, version: int | None = None) -> None:
        """Reads what there is, up to a version."""
        found = with_bucket(self.url, lambda bucket: _find(bucket, version))
        if found is not None:
            self.run, self._head, self.last = found

    def check(self, candidate: _Candidate) -> None:
        """That its weights have the names, dtypes and shapes of the run. Before it is taken over for nothing."""
        if self.run is None:
            return
        ours = schema_of(self.run)
        theirs = schema_of_weights(candidate.checkpoint)
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                raise SchemaChanged(
                    f"{candidate.path}: tensor {name!r} is {_describe(theirs.get(name))}, and "
                    f"{_describe(ours.get(name))} in the run at {self.where}",
                    hint="a run's names, dtypes and shapes are fixed: start a new run under another URL",
                )

    def has(self, candidate: _Candidate) -> bool:
        """That these weights are the newest version already."""
        newest = self._publisher.state if self._publisher else self._head.after if self._head else None
        return bool(newest) and candidate.state == newest

    def open(self, parent: Path, candidate: _Candidate | None) -> None:
        """Takes over the run, or starts it; once."""
        if self.is_open:
            return
        published = publish_cache.load(parent, self.run.run, self._head.after) if self.run and self._head else None
        with progress_bar("opening the run"):
            self._publisher = Publisher(
                self.url,
                base=self.base,
                source=self.source,
                files=self._side_files(candidate) if self.run is None else {},
                anchor_every=self.anchor_every,
                blocking=True,
                insist=self.insist,
                published=published,
                threads=self.threads,
                on_event=self._ear,
            )
        if self.run is None and self.base is not None:  # which has started it
            self.find()

    def _side_files(self, candidate: _Candidate | None) -> Mapping[str, bytes]:
        checkpoint = candidate.checkpoint if candidate is not None else None
        if (checkpoint is None or not checkpoint.side_files) and self.base is not None:
            checkpoint = Checkpoint(self.base)
        kept = side_files(checkpoint, _note_too_large) if checkpoint is not None else {}
        return {name: path.read_bytes() for name, path in kept.items()}

    def publish(self, candidate: _Candidate, parent: Path) -> None:
        assert self._publisher is not None
        began = time.perf_counter()
        try:
            with progress_bar("publishing"):
                publication = self._publisher.publish(
                    candidate.checkpoint, step=candidate.step, check=candidate.check_whole
                )
                version = publication.wait()
        except WeightwireError as problem:
            self._failed = problem
            self._ear.forget()
            raise
        seconds = time.perf_counter() - began
        self._ear.speak()
        self.find(version)
        if self.run is not None and self.last is not None:
            publish_cache.store(parent, self.run.run, self.last.after, version, candidate.checkpoint)
            self._tell(self.last, candidate, seconds)

    def tell_newest(self, candidate: _Candidate) -> None:
        self.find()
        version = self._head.version if self._head else None
        say(f"already version {version} of {self.where}: nothing to publish")
        self.write({"url": self.where, "version": version, "published": False, "state": candidate.state})

    def _tell(self, commit: Commit, candidate: _Candidate, seconds: float) -> None:
        weights = sum(tensor.count for tensor in candidate.checkpoint.values())
        whole, size = byte_size(candidate.nbytes), byte_size(commit.nbytes)
        what = "an anchor" if commit.kind == ANCHOR else f"{percent(commit.changed, weights)} changed"
        share = f" ({percent(commit.nbytes, candidate.nbytes)})" if commit.nbytes < candidate.nbytes else ""
        say(f"version {commit.version} of {self.where}: {size} for {whole} of weights{share}, {what}, {seconds:.1f} s")
        self.write(
            {
                "url": self.where,
                "version": commit.version,
                "published": True,
                "state": commit.after,
                "checkpoint": str(candidate.path),
                "kind": commit.kind,
                "step": commit.step,
                "bytes": commit.nbytes,
                "changed": commit.changed,
                "weights": weights,
                "weights_bytes": candidate.nbytes,
                "seconds": round(seconds, 3),
            }
        )


async def _find(bucket: Bucket, version: int | None) -> tuple[Run, Commit | None, Commit | None] | None:
    """The run; the commit of a version, or the newest; and the newest up to it that is no fence."""
    try:
        chain = ChainReader(bucket, await read_run(bucket))
    except NoRun:
        return None
    head = await (chain.read_head() if version is None else chain.read(version))
    last = head
    while last is not None and last.record.kind == FENCE:
        number = last.record.version - 1
        last = await chain.read_linked(number, last.record.parent) if number >= 0 else None
    return chain.run, head.record if head else None, last.record if last else None


def _describe(tensor: tuple[Dtype, tuple[int, ...]] | None) -> str:
    return "not there" if tensor is None else f"{tensor[0].name} {list(tensor[1])}"


def _warn(message: str, hint: str | None = None) -> None:
    say(f"warning: {message}")
    if hint:
        say(f"hint: {hint}")


def _write_nothing(value: Mapping[str, Any]) -> None:
    pass
