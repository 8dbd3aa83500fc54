"""The follower's API: keeps a replica up to date in a background thread and hands out updates.

The work itself is in `follow_loop`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weightwire.bucket import Bucket, open_bucket
from weightwire.chain import REPLICA_NAMES, StageTiming, is_replica_name
from weightwire.errors import Closed, NoRun, ReplicaError, WeightwireError
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.follow_loop import FollowLoop
from weightwire.follower.own_name import own_name, renew_name
from weightwire.follower.trust_settings import TrustSettings
from weightwire.follower.update import Update
from weightwire.replica import Replica
from weightwire.system import Closeable, LoopThread, Runtime
from weightwire.telemetry import Listener, ProgressCallback, ignore_progress, log_event
from weightwire.weights import read_weights

__all__ = ["Follower"]

_LAST_HEARTBEAT = 5.0  # seconds; if it is not written by then, the lease runs out


class Follower(Closeable):
    """Follows a run into a directory, the replica.

    `with Follower("s3://bucket/run", into="replica") as follower:` and then `for update in follower.watch():`.
    `replica/current` is always a checkpoint of exactly one version. A follower that was killed continues where it was.

    - `base`: the checkpoint that the run starts from, if it is not in the bucket.
    - `name`: the name in heartbeats, `weightwire status` and the page. It must be unique in the run.
    - `trust`: public keys, or files of them, one of which must have signed the newest version; or "first-use" for the
      keys that the run has when it is first followed. By default those of WEIGHTWIRE_TRUST, if it is set. A follower
      with trusted keys never goes back to an older version or to another run, even if its weights are lost.
    - `max_age`: with `trust`: refuse new versions if the publisher's last sign of life is older than this, in seconds.
    - `on_progress`: for progress bars. Any thread may call it with a stage ("fetch", "apply", "verify", "read"), the
      bytes done since the last call, and all bytes of the stage. It must not raise.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Bucket,
        *,
        into: str | os.PathLike[str],
        base: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        name: str | None = None,
        trust: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        max_age: float | None = None,
        threads: int | None = None,
        on_event: Listener = log_event,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        if name is not None and not is_replica_name(name):
            raise ReplicaError(f"{name!r:.100} is not a valid replica name", hint=REPLICA_NAMES)
        self._is_named = name is not None  # other followers may have the same name, unlike one kept in the replica
        self._bucket = open_bucket(url)
        weights = None if base is None else read_weights(base)
        trusted = TrustSettings.of(trust, max_age)
        self.replica = Replica.open(into, threads=threads)
        self._running: Future[None] | None = None
        self._background = LoopThread("follower")
        self._closed = False

        context = FollowContext(self._bucket, Runtime(), self.replica, on_event, weights, threads, on_progress, trusted)

        async def make() -> FollowLoop:
            directory = self.replica.directory
            if name is not None:
                return FollowLoop(context, name)
            return FollowLoop(context, own_name(directory, context.warn), lambda: renew_name(directory))

        self._work = self._background.call(make())

    @property
    def version(self) -> int | None:
        """The version held, once it is known to belong to the run."""
        return self._work.version

    @property
    def head(self) -> int:
        """The newest version seen, or -1."""
        return self._work.head

    @property
    def trouble(self) -> str:
        """The current error, or an empty string."""
        return self._work.trouble

    @property
    def outage(self) -> float:
        """Seconds for which the bucket could not be read, or 0. Versions of that time are unknown here."""
        return self._work.outage

    def once(self) -> int:
        """Catches up with the newest version and returns it. Raises an error if that is not possible."""

        async def catch_up() -> int:
            await self._work.look()
            await (self._work.beat_unless_name_is_taken() if self._is_named else self._work.beat())
            if self._work.version is None:
                raise NoRun(
                    f"{self._bucket.url}: no weights have been published there yet", hint="wait for the publisher"
                )
            return self._work.version

        return self._background.call(catch_up())

    def start(self) -> None:
        """Starts following in the background."""
        if self._running is None and not self._closed:
            self._running = self._background.start(self._work.run())

    def wake(self, commit: bytes = b"") -> None:
        """Looks for new versions now. `commit` is the newest one as the publisher stored it, if it was pushed."""
        self._background.call_soon(lambda: self._work.wake(commit))

    def watch(self, timeout: float | None = None) -> Iterator[Update]:
        """Yields updates, each with one patch since the last. Ends after `timeout` seconds without a new version.

        The first update has no patch: load `checkpoint()`.
        """
        self.start()
        since = time.monotonic()
        while not self._closed:
            self._check_running()
            try:
                update = self.take()
                if update is None and (timeout is None or time.monotonic() - since <= timeout):
                    left = 1.0 if timeout is None else min(1.0, timeout - (time.monotonic() - since) + 0.01)
                    self._background.call(self._work.wait_for_more(max(left, 0.01)))
                    continue
            except (CancelledError, WeightwireError):
                if self._closed:  # by another thread
                    return
                raise
            if update is not None:
                yield update
                since = time.monotonic()
                continue
            return

    def take(self) -> Update | None:
        """The changes since the last update taken, or None."""
        return self._background.call(self._work.take())

    def report_served(
        self, version: int | None, trouble: str = "", stages: Mapping[str, StageTiming] | None = None
    ) -> None:
        """Reports the lowest version that this follower's engines serve, for its heartbeats."""
        self._background.call_soon(lambda: self._work.report_served(version, trouble, stages or {}))

    def _check_running(self) -> None:
        """Raises if the background task failed: otherwise it would look like a run without new versions."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    def checkpoint(self) -> Path:
        """Makes `current` the version held and returns its directory, which stays until the next call.

        It also stays after `close`, until the replica is opened again and `current` has changed.
        """
        self._check_holding()
        return self._background.call(self._work.checkpoint())

    @contextmanager
    def borrow_checkpoint(self) -> Iterator[Path]:
        """Like `checkpoint`, for concurrent loaders: the directory stays until the block ends."""
        self._check_holding()
        path = self._background.call(self._work.lend_checkpoint())
        try:
            yield path
        finally:
            if not self._closed:
                self._background.call(self._work.give_back(path))

    def _check_holding(self) -> None:
        if self._closed:
            raise Closed("this follower is closed", hint="create a new follower")
        if self.replica.position is None:
            raise ReplicaError("this replica holds nothing yet", hint="follow a run first: once(), or watch()")

    def close(self) -> None:
        """Stops following. `current` is then the version held."""
        if self._closed:
            return
        self._closed = True
        if not self._background.is_running:  # in a forked child
            return
        try:
            if self._running is not None:
                self._running.cancel()
            if self.replica.position is not None:
                self._background.call(self._work.make_current())
        finally:
            try:
                with suppress(TimeoutError, WeightwireError):
                    self._background.call(self._work.stop_beating(), _LAST_HEARTBEAT)
            finally:
                self._background.stop()
                self.replica.close()
