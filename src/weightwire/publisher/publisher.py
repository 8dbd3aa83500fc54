"""The publisher's interface for trainers: captures weights and returns. The work is done in a background thread.

The work itself is in `publish_loop`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightwire.bucket import Bucket, open_bucket
from weightwire.chain import PrivateKey, Signer, read_private_key, read_trusted_keys
from weightwire.errors import CheckpointError, Closed, NotPublished, WeightwireError, public_url
from weightwire.publisher.notifier import FollowerNotifier
from weightwire.publisher.publication import Publication, read_metrics, read_step
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.publish_process import PublishProcess
from weightwire.publisher.ranks.protocol import RankGroup
from weightwire.publisher.ranks.rank_process import RankProcess
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.single_process import SingleProcess
from weightwire.system import Deadline, LoopThread, Runtime
from weightwire.telemetry import Event, Listener, ProgressCallback, careful, ignore_progress, log_event
from weightwire.weights import (
    ADAPTER_CONFIG,
    DEFAULT_DTYPE,
    Casting,
    Checkpoint,
    Dtype,
    Tensor,
    Weights,
    adapter_config,
    read_live,
    read_weights,
    side_files,
    untie,
)

__all__ = ["Publisher"]

_LOOK = 0.5  # seconds between two looks at the bucket while closing
_HASTY_CLOSE = 30.0  # seconds that a failed program waits for pending publications


class Publisher:
    """Publishes versions of a model's weights into a bucket.

    Use `with Publisher("s3://bucket/run") as publisher:` and call `publisher.publish(weights, step=...)` after each
    step. `publish` returns once the weights are copied. The publisher continues the run at the URL; if there is none,
    the first publish starts it. The first publish whose weights fit the run claims it and fences off its previous
    publisher. Weights that do not fit are refused and disturb nobody.

    - `base`: a checkpoint that followers already have, and `source`: where they find it. A new run then starts from its
      digest, without an upload of all weights.
    - `files`: side files (config, tokenizer): a checkpoint directory, or a mapping of names to bytes. By default those
      of `base`.
    - `anchor_every`: versions between anchors, from which late joiners start. By default an anchor is written when the
      deltas since the last one add up to half its size.
    - `blocking`: `publish` returns after the commit, and needs one copy of the weights instead of two.
    - `notify`: URLs of followers to wake (HTTP POST) after each version.
    - `insist`: use a store without atomic create-if-absent. You must make sure that only one publisher runs.
    - `key`: the private key that signs every version: a file of `weightwire keygen`, or its text. By default that of
      the environment variable WEIGHTWIRE_KEY, if it is set. `trust`: public keys of earlier publishers of this run,
      whose versions it may continue; by default WEIGHTWIRE_TRUST.
    - `resumes`: whether the first weights should continue the run's newest version (default). If they differ, the
      publisher warns and publishes them. With False, for checkpoints in any order, it warns only if the step decreases.
    - `published`: the last published weights, to avoid downloading them after a restart. They are checked by digest.
    - `dtype`: the dtype for float32 torch tensors, which are treated as master weights; None keeps them. `dtypes`:
      exceptions by name pattern, such as {"*.router.*": "float32"}; the first match counts. In an existing run,
      float32 torch tensors are cast to the dtypes of the run. Other tensors are published unchanged.
    - `ranks`: the ranks that train one model together (`weightwire.trainers.torch.Ranks()`). Each rank makes a
      publisher and calls `publish` for every step. It uploads its own rows, and rank 0 commits them as one version.
      After a restart the first version is an anchor, unless `published` or `base` holds the newest weights.
    - `threads`: encoder threads. `on_event`: a listener for events; by default they are logged.
    - `on_progress`: for progress bars. Any thread may call it with a stage ("fetch", "apply", "verify", "read",
      "encode", "hash"), the bytes done since the last call, and all bytes of the stage. It must not raise.
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
        key: str | os.PathLike[str] | PrivateKey | None = None,
        trust: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        resumes: bool = True,
        published: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        dtype: str | None = DEFAULT_DTYPE,
        dtypes: Mapping[str, str] | None = None,
        ranks: RankGroup | None = None,
        threads: int | None = None,
        on_event: Listener = log_event,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        settings = PublisherSettings(
            base=None if base is None else _read_base(base, ranks is not None),
            source=public_url(source or "") or (os.path.abspath(base) if isinstance(base, str | os.PathLike) else ""),
            published=None if published is None else untie(read_weights(published))[0],
            files=_side_files(base, files),
            anchor_every=anchor_every,
            blocking=blocking,
            insist=insist,
            resumes=resumes,
            signer=_signer(key, trust),
            threads=threads,
            on_progress=on_progress,
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
        self._background = LoopThread("publisher")
        try:
            self._background.call(self._process.start())
        except BaseException:
            self._background.stop()
            self._process.leave()  # so that other ranks do not wait for this one
            raise
        self._running: Future[None] = self._background.start(self._loop.run())

    @property
    def version(self) -> int | None:
        """The newest version that this publisher knows of, including fences; None before the run exists."""
        return self._process.version

    @property
    def state(self) -> str | None:
        """The digest of the last published weights."""
        return self._process.state.hex if self._process.state else None

    @property
    def parameters(self) -> int | None:
        """How many weights a version has; None before the run exists."""
        run = self._process.run_record
        return None if run is None else run.parameters

    @property
    def dtypes(self) -> Mapping[str, Dtype]:
        """The published dtypes by tensor name; empty before the run exists."""
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
        """Captures weights and publishes them as the next version. They may change as soon as this returns.

        `weights` is a torch module, a mapping of names to tensors (a state dict, NumPy arrays), an iterator of names
        and tensors, or a checkpoint. An iterator must not reuse memory: all tensors are held until they are copied.
        Tied weights are published once. A PEFT model gives its active adapter, as PEFT saves it, and a new run gets its
        adapter_config.json; `merge` publishes the whole model with its adapters merged in, and does not change it.

        `step` and `metrics` are stored with the version. If the previous version is still being published, these
        weights wait, and newer ones replace them. `check` is called after the weights were read. It may raise a
        WeightwireError to cancel the publish, for files that another program may write to.
        """
        self._check_usable()
        try:
            views, aliases = read_live(
                weights, self._casting, self._process.dtypes, merge=merge, sharded=self._is_sharded
            )
            if not views and not self._is_sharded:  # a rank may hold no tensors
                raise _no_tensors(f"{self._context.bucket.url}: no tensors to publish")
            if not merge:
                self._note_adapter(weights)
            publication = Publication(
                step=read_step(step),
                metrics=read_metrics(metrics or {}),  # here, so that the caller gets the error
                aliases=aliases,
                check=check,
            )
        except BaseException:
            with self._one_at_a_time:
                self._process.skip()
            self._background.call_soon(self._loop.wake)
            raise
        with self._one_at_a_time:
            self._check_usable()
            views = self._own_rows(views, aliases)
            if self._context.settings.blocking:
                self._last = publication
                return self._publish_now(publication, views)
            try:
                self._loop.capture(publication, views)
                self._last = publication  # only after a successful capture: otherwise wait() would never return
            finally:
                self._background.call_soon(self._loop.wake)
        return publication

    def wait(self, *, replicas: int = 0, timeout: float | None = None) -> int:
        """Waits until the last publish is committed and `replicas` followers hold it. Returns its version."""
        if self._last is None:
            raise NotPublished("nothing has been published yet", hint="publish() first")
        deadline = Deadline(timeout)
        version = self._last.wait(timeout)
        if replicas:
            self._check_usable()
            try:
                self._background.call(self._loop.wait_for_replicas(version, replicas), deadline.left)
            except TimeoutError:
                raise TimeoutError(f"version {version}: not held by {replicas} replicas after {timeout:g} s") from None
        return version

    def close(self, timeout: float | None = None) -> None:
        """Publishes what is still waiting, and ends. Raises its failure, or TimeoutError.

        Without a timeout it waits as long as the bucket accepts writes. If that has failed for 5 minutes, it gives up
        and raises NotPublished, which names what was not published.
        """
        if self._closed:
            return
        self._closed = True
        if not self._background.is_running:  # in a forked child
            return
        deadline = Deadline(timeout)
        try:
            self._await_end(self._background.start(self._loop.close()), deadline)
            self._await_end(self._running, deadline)
            self._await_end(self._background.start(self._loop.close()), deadline)
        finally:
            self._background.stop(_HASTY_CLOSE if self._context.is_stuck else deadline.left)
            self._loop.abandon()
        if self._last is not None and not self._last.raised:
            self._last.wait(0)

    def _await_end(self, work: Future[None], deadline: Deadline) -> None:
        """Waits for work that ends when everything is published. Gives up if the bucket accepts nothing."""
        while True:
            left = deadline.left
            try:
                work.result(_LOOK if left is None else min(_LOOK, left))
                return
            except TimeoutError:
                if work.done():
                    raise
                if self._context.is_stuck:
                    work.cancel()
                    raise self._give_up() from None
                if left is not None and left <= _LOOK:
                    work.cancel()
                    raise

    def _give_up(self) -> WeightwireError:
        """Ends publishing for good. A commit that was sent may still arrive, so nothing may be sent in its place."""
        bucket, last = self._context.bucket, self._last
        what = "the last anchor" if last is None or last.done else last.name
        reason = bucket.problem.message if bucket.problem else f"{bucket.url} does not answer"
        failure = NotPublished(
            f"{what}: not published before the publisher was closed ({reason})",
            hint="make room in the bucket or make it reachable; the next publisher continues from the last commit",
        )
        self._context.lifecycle.fail(failure)
        return failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(WeightwireError, TimeoutError):  # the first error counts
            self.close(_HASTY_CLOSE)

    def _note_adapter(self, weights: Any) -> None:
        """Publishes the config of an adapter with a new run. Warns if the run has another one, which it keeps."""
        files, run = self._context.adapter_files, self._process.run_record
        if ADAPTER_CONFIG in files or (config := adapter_config(weights)) is None:
            return
        files[ADAPTER_CONFIG] = config
        known = next((one for one in run.files if one.name == ADAPTER_CONFIG), None) if run is not None else None
        if known is not None and known.sha256 != hashlib.sha256(config).hexdigest():
            self._context.warn(
                f"{self._context.bucket.url}: the run keeps its {ADAPTER_CONFIG}, which differs from this adapter's; "
                "if rank, alpha or layers have changed, start a new run"
            )

    def _publish_now(self, publication: Publication, views: Weights) -> Publication:
        self._background.call(self._loop.publish_now(publication, views))
        publication.wait(0)
        return publication

    def _own_rows(self, views: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
        """The rows that this process publishes: all of them, unless there are several ranks."""
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
            raise Closed("this publisher is closed", hint="create a new publisher")
        failure = self._context.lifecycle.failure
        if failure is not None:
            raise failure.with_traceback(None)  # or it would grow each time it is raised

    def _on_event(self, event: Event) -> None:
        self._emit(event)
        if event.stage == "commit" and self._notifier.urls and (writer := self._process.writer) is not None:
            tasks, commit = self._context.background, writer.head
            if commit is not None:
                self._background.call_soon(lambda: tasks.start(self._notifier.notify(commit), "notify"))


def _signer(
    key: str | os.PathLike[str] | PrivateKey | None,
    trust: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
) -> Signer | None:
    private = read_private_key(key)
    given = [trust] if isinstance(trust, str | os.PathLike) else trust
    return None if private is None else Signer(private, read_trusted_keys(given))


def _read_base(base: Any, is_sharded: bool) -> Weights:
    weights = untie(read_weights(base))[0]
    if not weights and not is_sharded:  # a rank may hold no tensors
        raise _no_tensors("the base has no tensors")
    return weights


def _no_tensors(message: str) -> CheckpointError:
    return CheckpointError(message, hint="pass the weights of a model")


def _side_files(base: Any, files: Any) -> dict[str, Path | bytes]:
    """The given side files; by default those of the base, if it is a directory."""
    source = base if files is None and isinstance(base, str | os.PathLike) else files
    if isinstance(source, str | os.PathLike):
        return dict(side_files(Checkpoint(source)))
    given: Mapping[str, Any] = source or {}
    for name, content in given.items():
        if not isinstance(content, bytes):
            raise CheckpointError(
                f"side file {name!r}: has type {type(content).__name__}, not bytes", hint="pass its content as bytes"
            )
    return dict(given)
