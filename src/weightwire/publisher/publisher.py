"""6 publish: the face that a trainer sees. Captures weights and returns; everything else happens in the background.

Knows threads; the work itself is in `publishing`.
"""

from __future__ import annotations

import json
import math
import operator
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightwire.bucket import Bucket, open_bucket
from weightwire.errors import CheckpointError, WeightwireError
from weightwire.publisher.publication import Publication
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.ranks.protocol import RankGroup
from weightwire.publisher.ranks.rounds import Together
from weightwire.publisher.takeover import PublisherSettings
from weightwire.system import LoopThread, Runtime
from weightwire.telemetry import Event, Listener, careful, log_event
from weightwire.weights import Casting, Checkpoint, Dtype, Tensor, Weights, read_live, read_weights, side_files, untie

__all__ = ["Publication", "Publisher", "RankGroup"]

_IN_A_HURRY = 30.0  # seconds that a program which has failed waits for what is still to be published


class Publisher:
    """Publishes versions of a model's weights into a bucket.

    `with Publisher("s3://bucket/run") as publisher:` and then `publisher.publish(weights, step=...)` after each step.
    `publish` returns as soon as the weights are captured. It continues the run at the URL, and fences off whoever
    published there before; where there is none, the first publish starts one.

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
        dtype: str | None = "bfloat16",
        dtypes: Mapping[str, str] | None = None,
        ranks: RankGroup | None = None,
        threads: int | None = None,
        on_event: Listener = log_event,
    ) -> None:
        self._ranks = ranks
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
        self._runtime = Runtime()
        self._emit = careful(on_event)
        self._notify = tuple(notify)
        self._blocking = blocking
        self._one_at_a_time = threading.Lock()
        self._last: Publication | None = None
        self._closed = False
        self._bucket = open_bucket(url) if isinstance(url, str | os.PathLike) else url
        self._background = LoopThread("weightwire-publisher")
        try:
            self._work = self._background.call(self._start(settings))
        except BaseException:
            self._background.stop()
            if ranks is not None:
                ranks.close()  # the others need not wait for this one
            raise
        self._running: Future[None] = self._background.start(self._work.run())

    async def _start(self, settings: PublisherSettings) -> PublishLoop:
        if self._ranks is None:
            work = PublishLoop(self._bucket, self._runtime, settings, self._heard)
        else:
            work = Together(self._bucket, self._runtime, settings, self._heard, self._ranks)
        await work.start()
        return work

    @property
    def version(self) -> int | None:
        """The newest version, a fence included; None in a run that has not begun."""
        return self._work.version

    @property
    def state(self) -> str | None:
        """The digest of the state published last."""
        return self._work.state.hex if self._work.state else None

    @property
    def weights(self) -> int | None:
        """How many a version has; None in a run that has not begun."""
        run = self._work.run_record
        return None if run is None else sum(math.prod(shape) for _, shape in run.tensors.values())

    @property
    def dtypes(self) -> Mapping[str, Dtype]:
        """By name, as they are published; none in a run that has not begun."""
        return self._work.dtypes

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
            sharded = self._ranks is not None
            views, aliases = read_live(weights, self._casting, self._work.dtypes, merge=merge, sharded=sharded)
            # What is no number is told now, to who gave it.
            numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
            step = None if step is None else operator.index(step)
        except BaseException:
            self._skip()
            raise
        publication = Publication(step=step, metrics=numbers, aliases=aliases, check=check)
        with self._one_at_a_time:
            self._check_usable()
            views = self._share(views, aliases)
            if self._blocking:
                self._last = publication
                return self._publish_now(publication, views)
            try:
                self._work.capture(publication, views)
                self._last = publication  # not one that was refused: nobody would wait for it in vain
            finally:
                self._background.tell(self._work.wake)
        return publication

    def wait(self, *, replicas: int = 0, timeout: float | None = None) -> int:
        """Until what was published last is committed, and so many followers hold it. Returns its version."""
        if self._last is None:
            raise WeightwireError("nothing has been published yet", hint="publish() first")
        until = None if timeout is None else time.monotonic() + timeout
        version = self._last.wait(timeout)
        if replicas:
            left = None if until is None else max(0.0, until - time.monotonic())
            self._check_usable()
            try:
                self._background.call(self._work.wait_for_replicas(version, replicas), left)
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
        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if until is None else max(0.0, until - time.monotonic())

        try:
            self._background.call(self._work.close(), left())
            self._running.result(left())
            self._background.call(self._work.close(), left())
        finally:
            self._background.stop(left())
            self._work.abandon()
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
        self._background.call(self._work.publish_now(publication, views))
        publication.wait(0)
        return publication

    def _share(self, views: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """What of them this rank is to publish: all of it, where there is only one."""
        if not isinstance(self._work, Together):
            return views
        if not self._work.joined:
            try:
                self._background.call(self._work.join(views, aliases))
            except BaseException:
                self._work.skip()
                raise
        self._work.catch_up()
        return self._work.mine(views)

    def _skip(self) -> None:
        """A publish that failed before anything was captured: the other ranks may have captured theirs."""
        if isinstance(self._work, Together):
            with self._one_at_a_time:
                self._work.skip()
            self._background.tell(self._work.wake)

    def _check_usable(self) -> None:
        if self._closed:
            raise WeightwireError("this publisher is closed", hint="make a new one")
        if self._work.failure is not None:
            raise self._work.failure.with_traceback(None)  # or it would grow with each time it is raised

    def _heard(self, event: Event) -> None:
        self._emit(event)
        if event.stage == "commit" and self._notify:
            self._background.tell(lambda: self._work.go_behind(self._wake_followers(event.version), "notify"))

    async def _wake_followers(self, version: int | None) -> None:
        for url in self._notify:
            try:
                await self._runtime.run_in_thread(_post, url, {"version": version})
            except (OSError, ValueError) as problem:
                self._heard(Event("warning", version, message=f"{url}: could not be woken ({problem})"))


def _post(url: str, body: Mapping[str, Any]) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=2):
        pass


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
