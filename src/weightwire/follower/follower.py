"""The follower that an inference server sees: keeps a replica up to date in the background, and hands out updates.

Knows threads; the work itself is in `follow_loop`.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weightwire.bucket import Bucket, open_bucket
from weightwire.chain import StageTiming, is_replica_name
from weightwire.errors import Closed, NoRun, ReplicaError, WeightwireError
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.follow_loop import FollowLoop
from weightwire.follower.update import Update
from weightwire.replica import Replica
from weightwire.system import Closeable, LoopThread, Runtime
from weightwire.telemetry import Listener, log_event
from weightwire.weights import read_weights

__all__ = ["Follower"]

_LAST_WORDS = 5.0  # seconds that the last heartbeat may take: if it is not written, its lease runs out


class Follower(Closeable):
    """Follows a run into a directory, the replica.

    `with Follower("s3://bucket/run", into="replica") as follower:` and then `for update in follower.watch():`. Whatever
    happens, `replica/current` is a checkpoint of exactly one version. One that was killed goes on where it was.

    - `base`: the checkpoint that the run starts from, where it starts from one that is not in the bucket.
    - `name`: under which the publisher sees this follower.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Bucket,
        *,
        into: str | os.PathLike[str],
        base: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        name: str | None = None,
        threads: int | None = None,
        on_event: Listener = log_event,
    ) -> None:
        if name is not None and not is_replica_name(name):
            raise ReplicaError(f"{name!r:.100} is no name for a replica", hint="use letters, digits, '.', '_' and '-'")
        self._bucket = open_bucket(url)
        weights = None if base is None else read_weights(base)
        self.replica = Replica.open(into, threads=threads)
        self._running: Future[None] | None = None
        self._background = LoopThread("weightwire-follower")
        self._closed = False

        context = FollowContext(self._bucket, Runtime(), self.replica, on_event, weights, threads)

        async def make() -> FollowLoop:
            return FollowLoop(context, name or _own_name(self.replica.directory))

        self._work = self._background.call(make())

    @property
    def version(self) -> int | None:
        """The version held, if it is known to be one of the run."""
        return self._work.version

    @property
    def head(self) -> int:
        """The newest version that has been seen; -1 if none has."""
        return self._work.head

    @property
    def trouble(self) -> str:
        """What keeps it from going on, if anything does."""
        return self._work.trouble

    def once(self) -> int:
        """Catches up with what is there now. Returns the version. Raises what keeps it from doing so."""

        async def catch_up() -> int:
            await self._work.look()
            await self._work.beat()
            if self._work.version is None:
                raise NoRun(
                    f"{self._bucket.url}: no weights have been published there yet", hint="wait for the publisher"
                )
            return self._work.version

        return self._background.call(catch_up())

    def start(self) -> None:
        """Follows in the background from now on."""
        if self._running is None and not self._closed:
            self._running = self._background.start(self._work.run())

    def wake(self) -> None:
        """Looks for something new at once."""
        self._background.tell(self._work.wake)

    def watch(self, timeout: float | None = None) -> Iterator[Update]:
        """Updates as they come, each with one patch since the last. Ends when nothing new came for `timeout` seconds.

        The first has no patch: load `checkpoint()`.
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
                if self._closed:  # by another thread, just now
                    return
                raise
            if update is not None:
                yield update
                since = time.monotonic()
                continue
            return

    def take(self) -> Update | None:
        """What is new since the update taken last; None if nothing is."""
        return self._background.call(self._work.take())

    def report_served(
        self, version: int | None, trouble: str = "", stages: Mapping[str, StageTiming] | None = None
    ) -> None:
        """Tells the publisher the lowest version that the engines serve which are kept up to date from here."""
        self._background.tell(lambda: self._work.report_served(version, trouble, stages or {}))

    def _check_running(self) -> None:
        """A fault of ours must not look like a run without news."""
        if self._running is not None and self._running.done() and not self._running.cancelled():
            self._running.result()

    def checkpoint(self) -> Path:
        """Makes `current` the version held now; returns where it is: a directory that stays until the next call.

        It is still there after `close`, and goes when the replica is opened again and `current` is another.
        """
        self._check_holding()
        return self._background.call(self._work.checkpoint())

    @contextmanager
    def borrow_checkpoint(self) -> Iterator[Path]:
        """`checkpoint`, for one of several who load at the same time: the directory stays until the block ends."""
        self._check_holding()
        path = self._background.call(self._work.lend_checkpoint())
        try:
            yield path
        finally:
            if not self._closed:
                self._background.call(self._work.give_back(path))

    def _check_holding(self) -> None:
        if self._closed:
            raise Closed("this follower is closed", hint="make a new one")
        if self.replica.position is None:
            raise WeightwireError("this replica holds nothing yet", hint="follow a run first: once(), or watch()")

    def close(self) -> None:
        """Stops following, and leaves `current` at the version held."""
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
                    self._background.call(self._work.stop_beating(), _LAST_WORDS)
            finally:
                self._background.stop()
                self.replica.close()


def _own_name(directory: Path) -> str:
    """The same after every restart: kept in the replica."""
    path = directory / "name"
    name = ""
    with suppress(OSError, UnicodeDecodeError):
        name = path.read_text(encoding="ascii").strip()
    if not is_replica_name(name):  # none yet, or what a power cut left of it
        host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()).strip(".-")[:60] or "replica"
        name = f"{host}-{secrets.token_hex(3)}"
        path.write_text(name + "\n", encoding="ascii")
    return name
