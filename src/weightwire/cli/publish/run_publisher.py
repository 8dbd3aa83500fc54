"""Publishes checkpoints to a run: finds it, opens a publisher, and reports each version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from weightwire.bucket import Bucket, open_bucket
from weightwire.catchup import plan
from weightwire.chain import ANCHOR, FENCE, ChainReader, Commit, Run, Signer, check_signer, read_run
from weightwire.cli.publish import publish_cache
from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate
from weightwire.cli.publish.commit_observer import CommitObserver, SentCommit
from weightwire.cli.shared.bucket_command import with_bucket
from weightwire.cli.shared.metered_bucket import MeteredBucket
from weightwire.cli.shared.progress_bar import StageBar, progress_bar
from weightwire.cli.shared.run_output import PublishOutput
from weightwire.cli.shared.terminal import byte_size, percent, say
from weightwire.cli.shared.trust_options import signer_of
from weightwire.errors import DataGone, NoRun, WeightwireError
from weightwire.publisher import Publisher
from weightwire.system import read_regular
from weightwire.telemetry import Event
from weightwire.weights import Checkpoint, check_schema, schema_of_weights, side_files

__all__ = ["FoundRun", "PublishOptions", "RunPublisher"]


@dataclass(frozen=True)
class PublishOptions:
    """The options of `weightwire publish`."""

    url: str
    base: Path | None = None
    source: str | None = None
    anchor_every: int | None = None
    insist: bool = False
    key: Path | None = None
    trust: Sequence[str] | None = None
    threads: int | None = None


@dataclass(frozen=True)
class FoundRun:
    """An existing run."""

    run: Run
    head: Commit | None
    last: Commit | None  # the newest commit with weights


class _PublishEvents:
    """Receives the publisher's events. Holds warnings back until it is known whether an error repeats them."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.committed: int | None = None  # the last version of this publisher
        self.anchor_bytes: dict[int, int] = {}  # of anchors beside the chain, by version
        self._warn = warn
        self._held: list[str] = []

    def __call__(self, event: Event) -> None:
        if event.stage == "commit":
            self.committed = event.version
        if event.stage == "encode" and event.message == ANCHOR and event.version is not None:
            self.anchor_bytes[event.version] = event.nbytes
        if event.stage == "warning":
            if event.message.endswith(("trying again", "still waiting")):
                self._warn(event.message)
            else:
                self._held.append(event.message)
        elif event.stage == "recovered":
            say(event.message)

    def warn_held(self) -> None:
        for message in self._held:
            self._warn(message)
        self.forget()

    def forget(self) -> None:
        self._held.clear()


class RunPublisher:
    """Publishes checkpoints to a run and reports each version. Use it in a `with` block, which closes it."""

    def __init__(
        self,
        options: PublishOptions,
        write: Callable[[PublishOutput], None],
        warn: Callable[[str], None],
    ) -> None:
        self.options = options
        self.where = open_bucket(options.url).url
        self.found: FoundRun | None = None
        self._signer = signer_of(options.key, options.trust)
        self._write = write
        self._began = time.perf_counter()
        self._events = _PublishEvents(warn)
        self._progress = StageBar()
        self._publisher: Publisher | None = None
        self._failed: WeightwireError | None = None
        self._sent: SentCommit | None = None  # the last commit

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._publisher is None:
            return
        try:
            with progress_bar("closing the run") as self._progress.bar:  # an anchor may still be uploading
                self._publisher.__exit__(kind, error, traceback)
        except WeightwireError as problem:
            if problem is not self._failed:  # otherwise it has been reported
                raise
        if isinstance(error, KeyboardInterrupt):
            self._events.forget()  # `left` is the one line that follows
        self._events.warn_held()

    @property
    def left(self) -> str:
        """The state of the run, for the last line of an interrupted command."""
        sent, known = self._sent, self._known_version
        if sent is not None and (known is None or sent.version > known):
            maybe = f"{self.where} may be at version {sent.version}"
            if sent.has_weights:
                return f"{maybe}: its commit was sent, but not answered"
            return f"nothing was published; {maybe}: a {sent.kind} was sent, but not answered"
        where = f"{self.where} is at version {known}" if known is not None else f"{self.where} has no version yet"
        has_published = self._events.committed is not None or (
            sent is not None and sent.is_answered and sent.has_weights
        )
        return where if has_published else f"nothing was published; {where}"

    @property
    def _known_version(self) -> int | None:
        """The newest version that is known to be in the bucket."""
        sent, head = self._sent, self.found.head if self.found else None
        versions = (
            self._events.committed,
            self._publisher.version if self._publisher else None,
            head.version if head else None,
            sent.version if sent and sent.is_answered else None,
        )
        return max((version for version in versions if version is not None), default=None)

    @property
    def is_open(self) -> bool:
        return self._publisher is not None

    def find(self, version: int | None = None) -> None:
        """Reads the run, at a version or at the newest."""
        self.found = with_bucket(self.options.url, lambda bucket: _find(bucket, version, self._signer)) or self.found

    def check(self, candidate: CheckpointCandidate) -> None:
        """Raises if the weights do not have the names, dtypes and shapes of the run, or of the base of a new one."""
        if self.found is not None:
            fixed = self.found.run.schema
        elif self.options.base is not None:
            fixed = schema_of_weights(Checkpoint(self.options.base))
        else:
            return
        check_schema(schema_of_weights(candidate.checkpoint), fixed, where=str(candidate.path), url=self.where)

    def has(self, candidate: CheckpointCandidate) -> bool:
        """Whether these weights are already the newest version."""
        head = self.found.head if self.found else None
        newest = self._publisher.state if self._publisher else head.after if head else None
        return bool(newest) and candidate.state == newest

    def needs(self, candidate: CheckpointCandidate) -> bool:
        """Whether to publish these weights: they are new, or `--anchor-every 1` asks for an anchor of them."""
        if not self.has(candidate):
            return True
        return self.options.anchor_every == 1 and not with_bucket(self.options.url, _is_anchored)

    def open(self, parent: Path, candidate: CheckpointCandidate | None) -> Publisher:
        """Opens the publisher, once. The first publish claims or starts the run; a base starts it now."""
        if self._publisher is not None:
            return self._publisher
        options, found = self.options, self.found
        published = publish_cache.load(parent, found.run.run, found.head.after) if found and found.head else None
        with progress_bar("opening the run") as self._progress.bar:
            publisher = self._publisher = Publisher(
                self._metered_bucket(),
                base=options.base,
                source=options.source,
                files=self._side_files(candidate) if found is None else {},
                anchor_every=options.anchor_every,
                blocking=True,
                insist=options.insist,
                key=self._signer.key if self._signer else None,  # read once: it may come from a pipe
                trust=options.trust,
                resumes=False,
                published=published,
                threads=options.threads,
                on_event=self._events,
                on_progress=self._progress,
            )
        if found is None and options.base is not None:  # the base has started the run
            self.find()
        return publisher

    def _metered_bucket(self) -> Bucket:
        """The bucket, whose uploads fill the bar and whose commits are noted for `left`."""
        progress = self._progress
        return MeteredBucket(
            CommitObserver(open_bucket(self.options.url), self._note_sent),
            on_put=lambda total: progress.bar.begin("uploading", total),
            on_write=lambda nbytes: progress.bar.add(nbytes),
        )

    def _note_sent(self, sent: SentCommit) -> None:
        self._sent = sent

    def _side_files(self, candidate: CheckpointCandidate | None) -> Mapping[str, bytes]:
        checkpoint = candidate.checkpoint if candidate is not None else None
        if (checkpoint is None or not checkpoint.side_files) and self.options.base is not None:
            checkpoint = Checkpoint(self.options.base)
        kept = side_files(checkpoint, _note_too_large) if checkpoint is not None else {}
        return {name: read_regular(path) for name, path in kept.items()}

    def publish(self, candidate: CheckpointCandidate, parent: Path) -> None:
        publisher = self.open(parent, candidate)
        began = time.perf_counter()
        try:
            with progress_bar("publishing") as self._progress.bar:
                publication = publisher.publish(candidate.checkpoint, step=candidate.step, check=candidate.check_whole)
                version = publication.wait()
        except WeightwireError as problem:
            self._failed = problem
            self._events.forget()
            raise
        seconds = time.perf_counter() - began
        self._events.warn_held()
        self.find(version)
        found = self.found
        if found is not None and found.last is not None:
            publish_cache.store(parent, found.run.run, found.last.after, version, candidate.checkpoint)
            self._tell(found.last, candidate, seconds)

    def tell_newest(self, candidate: CheckpointCandidate) -> None:
        self.find()
        if self.found is None or self.found.head is None:
            return
        head = self.found.head
        kept = _kept_step(self.found.last or head, candidate)
        say(f"already version {head.version} of {self.where}{kept}: nothing to publish")
        self._write(self._output(head, candidate, time.perf_counter() - self._began, published=False))

    def _tell(self, commit: Commit, candidate: CheckpointCandidate, seconds: float) -> None:
        weights = candidate.weights
        whole, size = byte_size(candidate.nbytes), byte_size(commit.nbytes)
        what = "an anchor" if commit.kind == ANCHOR else f"{percent(commit.changed, weights)} changed"
        anchor_bytes = self._events.anchor_bytes.get(commit.version)
        if anchor_bytes is not None:
            what += f", plus an anchor of {byte_size(anchor_bytes)}"
        share = f" ({percent(commit.nbytes, candidate.nbytes)})" if commit.nbytes < candidate.nbytes else ""
        step = "" if commit.step is None else f" (step {commit.step})"
        place = f"version {commit.version}{step} of {self.where} from {candidate.path.name or candidate.path}"
        say(f"{place}: {size} for {whole} of weights{share}, {what}, {seconds:.1f} s")
        self._write(self._output(commit, candidate, seconds, published=True))

    def _output(
        self, commit: Commit, candidate: CheckpointCandidate, seconds: float, *, published: bool
    ) -> PublishOutput:
        return PublishOutput.of_commit(
            commit,
            self._events.anchor_bytes.get(commit.version),
            url=self.where,
            published=published,
            checkpoint=str(candidate.path),
            weights=candidate.weights,
            weights_bytes=candidate.nbytes,
            seconds=round(seconds, 3),
        )


def _kept_step(commit: Commit, candidate: CheckpointCandidate) -> str:
    """A commit never changes, so another step for the same weights is not recorded."""
    if candidate.step is None or candidate.step == commit.step:
        return ""
    return " (it has no step)" if commit.step is None else f" (its step stays {commit.step})"


async def _find(bucket: Bucket, version: int | None, signer: Signer | None) -> FoundRun | None:
    """The run at a version, or at the newest. A key judges it, even if nothing will be published."""
    try:
        run = await read_run(bucket)
    except NoRun:
        return None
    check_signer(bucket.url, run, signer)
    chain = ChainReader(bucket, run, signer.trust if signer else None)
    await chain.check_not_rolled_back()
    head = await (chain.read_head() if version is None else chain.read(version))
    last = head
    if head is not None and head.record.kind == FENCE:
        last = await chain.read_weights_before(head)
    return FoundRun(chain.run, head.record if head else None, last.record if last else None)


async def _is_anchored(bucket: Bucket) -> bool:
    """Whether an anchor holds the newest weights."""
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
    say(f"note: {name} ({byte_size(size)}) is left out: it is too large for a config or tokenizer")
