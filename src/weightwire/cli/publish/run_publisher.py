"""A run, and what it takes to publish checkpoints there: finding it, taking it over, and telling of each version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightwire.bucket import Bucket, open_bucket
from weightwire.catchup import plan
from weightwire.chain import ANCHOR, FENCE, ChainReader, Commit, Run, read_run
from weightwire.cli.publish import publish_cache
from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate
from weightwire.cli.shared.bucket_command import with_bucket
from weightwire.cli.shared.terminal import byte_size, percent, progress_bar, say, warn
from weightwire.errors import DataGone, NoRun, WeightwireError
from weightwire.publisher import Publisher
from weightwire.telemetry import Event
from weightwire.weights import Checkpoint, check_schema, schema_of_weights, side_files

__all__ = ["FoundRun", "PublishOptions", "RunPublisher"]


@dataclass(frozen=True)
class PublishOptions:
    """Where to publish, and how."""

    url: str
    base: Path | None = None
    source: str | None = None
    anchor_every: int | None = None
    insist: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class FoundRun:
    """A run that is there already."""

    run: Run
    head: Commit | None
    last: Commit | None  # the newest commit up to it that is not a fence


class _HeldWarnings:
    """Hears of a publish, and keeps warnings until it is known whether they matter."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def __call__(self, event: Event) -> None:
        if event.stage == "warning":
            # The others may end in an error that says the same: they are told if it does not come.
            if event.message.endswith("trying again"):
                warn(event.message)
            else:
                self._held.append(event.message)

    def speak(self) -> None:
        for message in self._held:
            warn(message)
        self.forget()

    def forget(self) -> None:
        self._held.clear()


class RunPublisher:
    """Publishes checkpoints to a run, and tells of each. Closed at the end of a `with` block."""

    def __init__(self, options: PublishOptions, write: Callable[[Mapping[str, Any]], None]) -> None:
        self.options = options
        self.where = open_bucket(options.url).url
        self.found: FoundRun | None = None
        self._write = write
        self._warnings = _HeldWarnings()
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
        self._warnings.speak()

    @property
    def is_open(self) -> bool:
        return self._publisher is not None

    def find(self, version: int | None = None) -> None:
        """Reads what there is, up to a version."""
        self.found = with_bucket(self.options.url, lambda bucket: _find(bucket, version)) or self.found

    def check(self, candidate: CheckpointCandidate) -> None:
        """That its weights have the names, dtypes and shapes of the run, or of the base that it is to start from."""
        if self.found is not None:
            fixed = self.found.run.schema
        elif self.options.base is not None:
            fixed = schema_of_weights(Checkpoint(self.options.base))
        else:
            return
        check_schema(schema_of_weights(candidate.checkpoint), fixed, where=str(candidate.path), url=self.where)

    def has(self, candidate: CheckpointCandidate) -> bool:
        """That these weights are the newest version already."""
        head = self.found.head if self.found else None
        newest = self._publisher.state if self._publisher else head.after if head else None
        return bool(newest) and candidate.state == newest

    def needs(self, candidate: CheckpointCandidate) -> bool:
        """That these weights are to be published: they are new, or `--anchor-every 1` asks for an anchor of them."""
        if not self.has(candidate):
            return True
        return self.options.anchor_every == 1 and not with_bucket(self.options.url, _is_anchored)

    def open(self, parent: Path, candidate: CheckpointCandidate | None) -> Publisher:
        """Opens the publisher, once. It claims or starts the run with its first publish, or now if there is a base."""
        if self._publisher is not None:
            return self._publisher
        options, found = self.options, self.found
        published = publish_cache.load(parent, found.run.run, found.head.after) if found and found.head else None
        with progress_bar("opening the run"):
            publisher = self._publisher = Publisher(
                options.url,
                base=options.base,
                source=options.source,
                files=self._side_files(candidate) if found is None else {},
                anchor_every=options.anchor_every,
                blocking=True,
                insist=options.insist,
                published=published,
                threads=options.threads,
                on_event=self._warnings,
            )
        if found is None and options.base is not None:  # which has started it
            self.find()
        return publisher

    def _side_files(self, candidate: CheckpointCandidate | None) -> Mapping[str, bytes]:
        checkpoint = candidate.checkpoint if candidate is not None else None
        if (checkpoint is None or not checkpoint.side_files) and self.options.base is not None:
            checkpoint = Checkpoint(self.options.base)
        kept = side_files(checkpoint, _note_too_large) if checkpoint is not None else {}
        return {name: path.read_bytes() for name, path in kept.items()}

    def publish(self, candidate: CheckpointCandidate, parent: Path) -> None:
        publisher = self.open(parent, candidate)
        began = time.perf_counter()
        try:
            with progress_bar("publishing"):
                publication = publisher.publish(candidate.checkpoint, step=candidate.step, check=candidate.check_whole)
                version = publication.wait()
        except WeightwireError as problem:
            self._failed = problem
            self._warnings.forget()
            raise
        seconds = time.perf_counter() - began
        self._warnings.speak()
        self.find(version)
        found = self.found
        if found is not None and found.last is not None:
            publish_cache.store(parent, found.run.run, found.last.after, version, candidate.checkpoint)
            self._tell(found.last, candidate, seconds)

    def tell_newest(self, candidate: CheckpointCandidate) -> None:
        self.find()
        version = self.found.head.version if self.found and self.found.head else None
        say(f"already version {version} of {self.where}: nothing to publish")
        self._write({"url": self.where, "version": version, "published": False, "state": candidate.state})

    def _tell(self, commit: Commit, candidate: CheckpointCandidate, seconds: float) -> None:
        weights = sum(tensor.count for tensor in candidate.checkpoint.values())
        whole, size = byte_size(candidate.nbytes), byte_size(commit.nbytes)
        what = "an anchor" if commit.kind == ANCHOR else f"{percent(commit.changed, weights)} changed"
        share = f" ({percent(commit.nbytes, candidate.nbytes)})" if commit.nbytes < candidate.nbytes else ""
        say(f"version {commit.version} of {self.where}: {size} for {whole} of weights{share}, {what}, {seconds:.1f} s")
        self._write(
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


async def _find(bucket: Bucket, version: int | None) -> FoundRun | None:
    """The run as it is at a version, or at the newest."""
    try:
        chain = ChainReader(bucket, await read_run(bucket))
    except NoRun:
        return None
    head = await (chain.read_head() if version is None else chain.read(version))
    last = head
    while last is not None and last.record.kind == FENCE:
        number = last.record.version - 1
        last = await chain.read_linked(number, last.record.parent) if number >= 0 else None
    return FoundRun(chain.run, head.record if head else None, last.record if last else None)


async def _is_anchored(bucket: Bucket) -> bool:
    """That an anchor holds the newest weights, so that no delta is needed to rebuild them."""
    chain = ChainReader(bucket, await read_run(bucket))
    head = await chain.read_head()
    if head is None:
        return False
    try:
        path = await plan(chain, head)
    except DataGone:
        return False
    return bool(path.start and path.start.nbytes) and not any(commit.record.nbytes for commit in path.commits)


def _note_too_large(name: str, size: int) -> None:
    say(f"note: {name} ({byte_size(size)}) is left out: it is too large to be a config or a tokenizer")
