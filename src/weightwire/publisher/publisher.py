"""The publisher that a trainer sees: captures weights and returns; everything else happens in the background.

Knows threads; the work itself is in `publish_loop`.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightwire.bucket import Bucket, open_bucket
from weightwire.errors import CheckpointError, Closed, WeightwireError
from weightwire.publisher.notifier import FollowerNotifier
from weightwire.publisher.publication import Publication, read_metrics
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.publish_process import PublishProcess
from weightwire.publisher.ranks.protocol import RankGroup
from weightwire.publisher.ranks.rank_process import RankProcess
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.single_process import SingleProcess
from weightwire.system import Deadline, LoopThread, Runtime
from weightwire.telemetry import Event, Listener, careful, log_event
from weightwire.weights import (
    DEFAULT_DTYPE,
    Casting,
    Checkpoint,
    Dtype,
    Tensor,
    Weights,
    read_live,
    read_weights,
    side_files,
    untie,
)

__all__ = ["Publisher"]

_IN_A_HURRY = 30.0  # seconds that a program which has failed waits for what is still to be published


class Publisher:
    """Publishes versions of a model's weights into a bucket.

    `with Publisher("s3://bucket/run") as publisher:` and then `publisher.publish(weights, step=...)` after each step.
    `publish` returns as soon as the weights are captured. It continues the run at the URL; where there is none, the
    first publish starts one. The first publish whose weights fit the run claims it, and fences off whoever published
    there before: a publisher of other weights harms nobody.

    - `base`: a checkpoint that followers have already, and `source`: where they can get it. A new run then starts from
      its digest, and needs no upload of all weights.
    - `files`: a checkpoint directory whose config and tokenizer go along, or names and contents. Those of `base`, if
      there is one.
    - `anchor_every`: versions between anchors, from which late followers start. By default one is made when the deltas
      since the last add up to half of one.
    - `blocking`: `publish` returns when the version is committed, and needs one copy of the weights instead of two.
    - `notify`: URLs of followers to wake (HTTP POST) after each version.
    - `insist`: use a bucket that cannot tell two publishers apart, and see to it that there is only one.
    - `published`: weights that may be those published last, to save fetching them after a restart.
    - `dtype`: what torch's float32 weights, the trainer's masters, are cast to; None leaves them as they are. `dtypes`:
      the same for floats whose names match a pattern, such as {"*.router.*": "float32"}; the first that matches counts.
      In a run that has begun all floats are cast to its own dtypes. NumPy arrays and files are published as they are.
    - `ranks`: those of a model that is trained by several processes (`weightwire.trainers.torch.Ranks()`). Each makes a
      publisher, and calls `publish` for every step: it publishes the rows that it holds, and rank 0 commits them as one
      version. After a restart the first version is an anchor, unless `published` or `base` is what was published last.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Bucket,
        *,
        base: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        source: str | None = None,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        anchor_every: int | None = None,
        blocking: bool = False,
        notify: Sequence[str] = (),
        insist: bool = False,
        published: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        dtype: str | None = DEFAULT_DTYPE,
        dtypes: Mapping[str, str] | None = None,
        ranks: RankGroup | None = None,
        threads: int | None = None,
        on_event: Listener = log_event,
    ) -> None:
        settings = PublisherSettings(
            base=None if base is None else untie(read_weights(base))[0],
            source=source or (os.path.abspath(base) if isinstance(base, str | os.PathLike) else ""),
            published=None if published is None else untie(read_weights(published))[0],
            files=_side_files(base, files),
            anchor_every=anchor_every,
            blocking=blocking,
            insist=insist,
            threads=threads,
        )
        self._casting = Casting.of(dtype, dtypes)
        self._is_sharded = ranks is not None
        self._one_at_a_time = threading.Lock()
        self._last: Publication | None = None
        self._closed = False
        self._emit = careful(on_event)
        runtime = Runtime()
        self._notifier = FollowerNotifier(tuple(notify), runtime, self._emit)
        self._context = context = PublishContext(open_bucket(url), runtime, settings, self._on_event)
        self._process: PublishProcess = SingleProcess(context) if ranks is None else RankProcess(context, ranks)
        self._loop = PublishLoop(context, self._process)
        self._background = LoopThread("weightwire-publisher")
        try:
            self._background.call(self._process.start())
        except BaseException:
            self._background.stop()
            self._process.leave()  # other ranks need not wait for this one
            raise
        self._running: Future[None] = self._background.start(self._loop.run())

    @property
    def version(self) -> int | None:
        """The newest version that this publisher knows of, a fence included; None in a run that has not begun."""
        return self._process.version

    @property
    def state(self) -> str | None:
        """The digest of the state published last."""
        return self._process.state.hex if self._process.state else None

    @property
    def parameters(self) -> int | None:
        """How many a version has; None in a run that has not begun."""
        run = self._process.run_record
        return None if run is None else run.parameters

    @property
    def dtypes(self) -> Mapping[str, Dtype]:
        """By name, as they are published; none in a run that has not begun."""
        return self._process.dtypes

    def publish(
        self,
        weights: Any,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        merge: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Publication:
        """Captures weights, to be published as the next version. They may change as soon as this returns.

        `weights` is a torch module, a mapping of names to tensors (a state dict, NumPy arrays), an iterator of names
        and tensors, or a checkpoint. What an iterator yields is held until all of it has been copied, so it must not
        use the same memory twice. Of tied weights one is published. `merge` publishes a PEFT model's weights with its
        adapters merged into them, and leaves the model as it is.

        `step` and `metrics` travel with the version. If the version before is still under way, these weights wait, and
        are replaced if newer ones come meanwhile. `check` is called when the weights have been read, and may call it
        off by raising a WeightwireError: for files that others may write to.
        """
        self._check_usable()
        try:
            views, aliases = read_live(
                weights, self._casting, self._process.dtypes, merge=merge, sharded=self._is_sharded
            )
            publication = Publication(
                step=None if step is None else operator.index(step),
                metrics=read_metrics(metrics or {}),  # here, where the caller sees what is wrong with them
                aliases=aliases,
                check=check,
            )
        except BaseException:
            with self._one_at_a_time:
                self._process.skip()
            self._background.tell(self._loop.wake)
            raise
        with self._one_at_a_time:
            self._check_usable()
            views = self._own_rows(views, aliases)
            if self._context.settings.blocking:
                self._last = publication
                return self._publish_now(publication, views)
            try:
                self._loop.capture(publication, views)
                self._last = publication  # not one that was refused: nobody would wait for it in vain
            finally:
                self._background.tell(self._loop.wake)
        return publication

    def wait(self, *, replicas: int = 0, timeout: float | None = None) -> int:
        """Until what was published last is committed, and so many followers hold it. Returns its version."""
        if self._last is None:
            raise WeightwireError("nothing has been published yet", hint="publish() first")
        deadline = Deadline(timeout)
        version = self._last.wait(timeout)
        if replicas:
            self._check_usable()
            try:
                self._background.call(self._loop.wait_for_replicas(version, replicas), deadline.left)
            except TimeoutError:
                raise TimeoutError(
                    f"version {version}: is not held by {replicas} replicas after {timeout:g} s"
                ) from None
        return version

    def close(self, timeout: float | None = None) -> None:
        """Publishes what is still waiting, and ends. Raises what went wrong with it, or TimeoutError."""
        if self._closed:
            return
        self._closed = True
        if not self._background.is_running:  # in a forked child
            return
        deadline = Deadline(timeout)
        try:
            self._background.call(self._loop.close(), deadline.left)
            self._running.result(deadline.left)
            self._background.call(self._loop.close(), deadline.left)
        finally:
            self._background.stop(deadline.left)
            self._loop.abandon()
        if self._last is not None and not self._last.raised:
            self._last.wait(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(WeightwireError, TimeoutError):  # what went wrong first is what counts
            self.close(_IN_A_HURRY)

    def _publish_now(self, publication: Publication, views: Weights) -> Publication:
        self._background.call(self._loop.publish_now(publication, views))
        publication.wait(0)
        return publication

    def _own_rows(self, views: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """What of them this process publishes: all of it, where there is only one."""
        process = self._process
        if not process.is_joined:
            try:
                self._background.call(process.join(views, aliases))
            except BaseException:
                process.skip()
                raise
        return process.own_rows(views)

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed("this publisher is closed", hint="make a new one")
        failure = self._context.lifecycle.failure
        if failure is not None:
            raise failure.with_traceback(None)  # or it would grow with each time it is raised

    def _on_event(self, event: Event) -> None:
        self._emit(event)
        if event.stage == "commit" and self._notifier.urls:
            tasks = self._context.background
            self._background.tell(lambda: tasks.start(self._notifier.notify(event.version), "notify"))


def _side_files(base: Any, files: Any) -> dict[str, Path | bytes]:
    """Those that are given; else those of the base, where that is a directory."""
    source = base if files is None and isinstance(base, str | os.PathLike) else files
    if isinstance(source, str | os.PathLike):
        return dict(side_files(Checkpoint(source)))
    given: Mapping[str, Any] = source or {}
    for name, content in given.items():
        if not isinstance(content, bytes):
            raise CheckpointError(f"side file {name!r}: is a {type(content).__name__}", hint="pass its bytes")
    return dict(given)
