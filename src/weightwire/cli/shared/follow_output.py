"""What commands that follow a run share: finding it, hearing of what happens, and a line for every version."""

from __future__ import annotations

import threading
import time
from threading import Event as Stop

import typer

from weightwire.bucket import open_bucket
from weightwire.chain import is_replica_name, read_run
from weightwire.cli.shared.bucket_command import with_bucket
from weightwire.cli.shared.terminal import byte_size, say, warn
from weightwire.errors import NoRun, Unavailable
from weightwire.follower import Update
from weightwire.telemetry import Event, Metrics

__all__ = ["FollowListener", "check_name", "find_run", "tell", "wait_for_run"]

_SLOWEST = 10.0  # seconds between two looks for a run


def check_name(name: str) -> None:
    if not is_replica_name(name):
        raise typer.BadParameter("takes up to 100 letters, digits, dots, dashes and underscores", param_hint="--name")


def find_run(url: str, wait: bool) -> bool:
    """Whether there is one. What may pass is left to the follower, if it is to wait."""
    try:
        with_bucket(url, read_run)
    except NoRun:
        if not wait:
            raise
        return False
    except Unavailable:
        if not wait:
            raise
    return True


def wait_for_run(url: str, stop: Stop) -> bool:
    """Returns whether there is one now; there is none if it was stopped before."""
    say(f"waiting for a run at {open_bucket(url).url}")
    seconds = 1.0
    while not stop.wait(seconds):
        if find_run(url, wait=True):
            return True
        seconds = min(1.2 * seconds, _SLOWEST)
    return False


class FollowListener:
    """Hears of everything in the follower's thread: counts bytes, and passes warnings on."""

    def __init__(self, metrics: Metrics | None) -> None:
        self.metrics = metrics
        self.pauses: dict[str, float] = {}  # engines, and for how long they did not serve
        self._applied: list[tuple[int | None, int]] = []  # versions and their bytes, as they came
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if self.metrics is not None:
            self.metrics(event)
        if event.stage == "apply":
            with self._lock:
                self._applied.append((event.version, event.nbytes))
        elif event.stage == "swap":
            self.pauses[event.message] = event.seconds
        elif event.stage == "warning":
            message, _, hint = event.message.partition("\nhint: ")
            warn(message, hint)
        elif event.stage == "recovered":
            say(event.message)

    def fetched_bytes(self, version: int) -> int | None:
        """Bytes that led to a version, since it was asked last; None if it was not applied but held before.

        Later versions may have been applied by now: theirs are left for the next time.
        """
        with self._lock:
            known = [index for index, (applied, _) in enumerate(self._applied) if applied == version]
            if not known:
                return None
            taken, self._applied = self._applied[: known[-1] + 1], self._applied[known[-1] + 1 :]
            return sum(nbytes for _, nbytes in taken)


def tell(update: Update, listener: FollowListener) -> tuple[int, float | None, dict[str, float]]:
    """A line for a version. Returns its bytes, how far it was behind the commit, and the pauses of engines."""
    nbytes = listener.fetched_bytes(update.version)
    behind = max(0.0, time.time() - update.time) if update.time and nbytes is not None else None
    late = "" if behind is None else f", {behind:.2f} s behind the commit"
    step = "" if update.step is None else f" (step {update.step})"
    pauses, listener.pauses = listener.pauses, {}
    fetched = "held already" if nbytes is None else byte_size(nbytes)
    paused = "".join(f", {engine} paused for {1000 * seconds:.0f} ms" for engine, seconds in pauses.items())
    say(f"version {update.version}{step}: {fetched}{late}{paused}")
    return nbytes or 0, behind, pauses
