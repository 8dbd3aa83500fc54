"""What `follow` and `serve` share: finding the run, listening to the follower, and reporting each version."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Stop

import typer

from weightwire.chain import REPLICA_NAMES, is_replica_name, read_run
from weightwire.cli.shared.bucket_command import ago, url_of, with_bucket
from weightwire.cli.shared.json_output import RecoveredOutput, warn_as_json, write_json_line
from weightwire.cli.shared.progress_bar import StageBar
from weightwire.cli.shared.terminal import byte_size, say, warn
from weightwire.errors import NoRun, Unavailable
from weightwire.follower import Update
from weightwire.replica import CheckpointAbout
from weightwire.telemetry import Event, Metrics

__all__ = ["Arrival", "FollowListener", "check_name", "current_version", "find_run", "report", "wait_for_run"]

_SLOWEST = 10.0  # seconds between two looks for a run


def check_name(name: str) -> None:
    if not is_replica_name(name):
        raise typer.BadParameter(REPLICA_NAMES, param_hint="--name")


def find_run(url: str, wait: bool) -> bool:
    """Whether the run exists. With `wait`, an unreachable bucket counts as yes: the follower retries."""
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
    """Returns False if it was stopped before the run existed."""
    say(f"waiting for a run at {url_of(url)}")
    seconds = 1.0
    while not stop.wait(seconds):
        if find_run(url, wait=True):
            return True
        seconds = min(1.2 * seconds, _SLOWEST)
    return False


def current_version(replica: Path) -> int | None:
    """The version of the checkpoint at DIR/current."""
    with suppress(OSError, ValueError):
        return CheckpointAbout.read(replica / "current").version
    return None


@dataclass(frozen=True)
class Arrival:
    """How a version arrived. `bytes_fetched` is None if the replica held it already."""

    bytes_fetched: int | None
    seconds: float
    behind_seconds: float | None  # since the commit
    first: bool  # of this process: the time since the commit is not a lag
    pauses: dict[str, float]  # seconds by engine
    served_version: int | None = None  # the lowest that any engine serves


class FollowListener:
    """Receives events on the follower's thread. Counts bytes and forwards warnings."""

    def __init__(self, metrics: Metrics | None = None, *, as_json: bool = False) -> None:
        self.metrics = metrics
        self.progress = StageBar()  # shown when a command sets its bar
        self._as_json = as_json
        self._warn = warn_as_json if as_json else warn
        self._pauses: dict[str, float] = {}
        self._applied: list[tuple[int | None, int]] = []  # versions and their bytes, in order of arrival
        self._began: float | None = time.perf_counter()
        self._first = True
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if self.metrics is not None:
            self.metrics(event)
        if event.stage == "discover":
            with self._lock:
                self._began = self._began or time.perf_counter() - event.seconds
        elif event.stage == "apply":
            with self._lock:
                self._applied.append((event.version, event.nbytes))
        elif event.stage == "swap":
            self._pauses[event.message] = event.seconds
        elif event.stage == "warning":
            message, _, hint = event.message.partition("\nhint: ")
            self._warn(message, hint)
        elif event.stage == "recovered":
            say(event.message)
            if self._as_json:
                write_json_line(RecoveredOutput.of(event.message))

    def bytes_fetched(self, version: int) -> int | None:
        """Bytes fetched to reach a version since the last call; None if the replica held it already.

        Bytes of later versions are kept for the next call.
        """
        with self._lock:
            known = [index for index, (applied, _) in enumerate(self._applied) if applied == version]
            if not known:
                return None
            taken, self._applied = self._applied[: known[-1] + 1], self._applied[known[-1] + 1 :]
            return sum(nbytes for _, nbytes in taken)

    def arrival(self, update: Update) -> Arrival:
        """Call it once per update, after the engines have it."""
        fetched = self.bytes_fetched(update.version)
        with self._lock:
            began, self._began = self._began, None
        seconds = 0.0 if began is None else time.perf_counter() - began
        behind = max(0.0, time.time() - update.time) if update.time and fetched is not None else None
        first, self._first = self._first, False
        return Arrival(fetched, seconds, behind, first, self.pop_pauses())

    def pop_pauses(self) -> dict[str, float]:
        """Seconds by engine, since the last call."""
        pauses, self._pauses = self._pauses, {}
        return pauses


def report(update: Update, arrival: Arrival, checkpoint: Path | None = None, engines: str = "") -> None:
    """One line on stderr for a version, with the place of its checkpoint, and the engines that do not serve it."""
    step = "" if update.step is None else f" (step {update.step})"
    fetched = "held already" if arrival.bytes_fetched is None else byte_size(arrival.bytes_fetched)
    late = ""
    if arrival.behind_seconds is not None:
        seconds = arrival.behind_seconds
        late = f", committed {ago(seconds)}" if arrival.first else f", {seconds:.2f} s behind the commit"
    paused = "".join(f", {engine} paused for {1000 * seconds:.0f} ms" for engine, seconds in arrival.pauses.items())
    place = "" if checkpoint is None else f", in {checkpoint}"
    say(f"version {update.version}{step}: {fetched}{late}{paused}{place}{engines}")
