"""The course of the demo: start all processes, kill a replica halfway, let it catch up, compare all weights.

Watches the run through its bucket. A view shows it to the user.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weightwire.bucket import open_bucket, probe_bucket
from weightwire.demo import programs
from weightwire.demo.processes import Process, Processes, answers, free_port
from weightwire.demo.programs import OWN_SERVER, ReplicaProgram
from weightwire.demo.proof import Proof, prove
from weightwire.engines.registry import Program
from weightwire.errors import BucketError, OutputError, WeightwireError
from weightwire.page.page_server import PageServer
from weightwire.page.run_reader import RunReader
from weightwire.page.run_view import RunView
from weightwire.system import LoopThread, Runtime

__all__ = ["DemoOptions", "DemoResult", "DemoView", "run_demo"]

_REQUESTS = 2.5  # requests of one look, compared with one poll of a follower
_START = 120.0  # seconds for our own server to start
_START_ENGINE = 600.0  # for any other engine
_CATCH_UP = 60.0
_ROOM = 256 << 20  # bytes of disk, mostly for a bucket in a directory
_AWAY = 4.0  # seconds until a killed replica is restarted


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs and where. `root` is a new directory."""

    run: str  # the URL
    root: Path
    steps: int
    seed: int
    engine: str
    replicas: int


@dataclass(frozen=True)
class DemoResult:
    """The final snapshot, the proof and the duration."""

    snapshot: RunView
    proof: Proof
    seconds: float


class DemoView(Protocol):
    """Shows the demo to the user."""

    def say(self, text: str) -> None:
        """Adds a line about something that happened."""

    def mark(self, replica: str, state: str) -> None:
        """Sets the special state of a replica; an empty one clears it."""

    def show(self, snapshot: RunView) -> None:
        """Shows the current state of the run."""


def run_demo(plan: DemoOptions, view: DemoView) -> DemoResult:
    """Runs the whole demo. Stops all processes at the end, also after an error."""
    began = time.monotonic()
    example = programs.find_example()
    asyncio.run(_try_bucket(plan.run))
    logs = _make_room(plan.root)
    with _watching(plan.run) as watcher, _page(plan.run) as page, Processes(logs) as processes:
        view.say(f"watch it live: {page.address}")
        demo = _DemoRun(plan, example, processes, watcher, view)
        demo.start_all()
        demo.train()
        snapshot = demo.catch_up()
        view.say("comparing the weights of the trainer and the replicas")
        proof = prove(demo.replicas, plan.root / "trained")
    return DemoResult(snapshot, proof, time.monotonic() - began)


def _make_room(root: Path) -> Path:
    """Creates the directory of this demo and checks the disk space. Returns the directory of the logs."""
    logs = root / "logs"
    try:
        logs.mkdir(parents=True)
        free = shutil.disk_usage(logs).free
    except OSError as problem:
        raise OutputError(
            f"{logs}: cannot create the directory ({problem.strerror})", hint="choose another one with --into"
        ) from problem
    if free < _ROOM:
        raise OutputError(
            f"{root}: only {free >> 20} MiB free, but the demo needs up to {_ROOM >> 20} MiB",
            hint="free some space, or choose another disk with --into",
        )
    return logs


def _page(run: str) -> PageServer:
    try:
        return PageServer(run)
    except WeightwireError:  # all the usual ports are in use
        return PageServer(run, port=0)


async def _try_bucket(url: str) -> None:
    """Reports a problem with the bucket before any process starts."""
    bucket = open_bucket(url)
    try:
        await probe_bucket(bucket, Runtime().token())
    finally:
        await bucket.close()


@dataclass(frozen=True)
class _Absent:
    """A killed replica, the time of the kill, and its version then."""

    replica: ReplicaProgram
    since: float
    version: int


class _DemoRun:
    """The processes of one demo and their progress."""

    def __init__(
        self, plan: DemoOptions, example: Path, processes: Processes, watcher: _RunWatcher, view: DemoView
    ) -> None:
        self._plan, self._example, self._processes, self._watcher, self._view = plan, example, processes, watcher, view
        self._running: dict[str, list[Process]] = {}  # by replica
        self._absent: _Absent | None = None
        self.replicas: list[ReplicaProgram] = []

    # --- start ------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Starts all processes at once. They wait for each other where they have to."""
        plan = self._plan
        port = free_port()
        environment = self._start("environment", programs.environment(self._example, port))
        self.replicas = [
            programs.replica(plan.engine, number, self._example, plan.run, plan.root, free_port())
            for number in range(1, plan.replicas + 1)
        ]
        for replica in self.replicas:
            self._start_replica(replica)
        self._processes.wait_to_answer(environment, f"http://127.0.0.1:{port}/health", _START)
        words = programs.trainer(
            self._example,
            plan.run,
            f"http://127.0.0.1:{port}",
            self.replicas,
            plan.steps,
            plan.seed,
            plan.root / "trained",
        )
        self._trainer = self._start("trainer", words)
        self._trainer.must_last = False
        names = ", ".join(one.name for one in self.replicas)
        self._view.say(f"started the environment, {names} and the trainer; weights travel only through {plan.run}")
        wait = "half a minute" if plan.engine == OWN_SERVER else "some minutes"
        self._view.say(f"loading the model in each process: up to {wait}")
        for replica in self.replicas:
            self._wait_for(replica)
            self._view.say(f"{replica.name} is ready at {replica.url}")

    def _start(self, name: str, command: Program) -> Process:
        return self._processes.start(name, command.argv, command.env)

    def _start_replica(self, replica: ReplicaProgram) -> None:
        self._running[replica.name] = [self._start(replica.name, replica.server)]
        if replica.follower is not None:
            self._running[replica.name].append(self._start(f"follower of {replica.name}", replica.follower))

    def _wait_for(self, replica: ReplicaProgram) -> None:
        def there() -> bool:
            self._look()
            return self._serves(replica)

        self._processes.wait(there, f"the start of {replica.name}", self._patience)

    def _serves(self, replica: ReplicaProgram) -> bool:
        return replica.name in self._running and answers(f"{replica.url}/health")

    @property
    def _patience(self) -> float:
        """Seconds for a server to start."""
        return _START if self._plan.engine == OWN_SERVER else _START_ENGINE

    # --- training ---------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Waits for the trainer to end. Halfway, kills the last replica and restarts it."""
        victim = self.replicas[-1] if len(self.replicas) > 1 else None
        while not self._trainer.ended:
            self._processes.check()
            snapshot = self._look()
            if victim is not None and _step(snapshot) >= self._plan.steps // 2:
                self._kill(victim)
                victim = None
            self._revive(snapshot)
            time.sleep(0.1)
        self._processes.check()

    def _kill(self, replica: ReplicaProgram) -> None:
        for process in self._running.pop(replica.name):
            self._processes.forget(process)
            process.kill()
        self._absent = _Absent(replica, time.monotonic(), _reached(self._look(), replica))
        self._view.mark(replica.name, "killed")
        self._view.say(f"killed {replica.name} at version {self._absent.version}, to show how it catches up")

    def _revive(self, snapshot: RunView) -> None:
        """Restarts the killed replica after some seconds, and reports when it has caught up."""
        one = self._absent
        if one is None:
            return
        if one.replica.name not in self._running and time.monotonic() - one.since > _AWAY:
            self._start_replica(one.replica)
            self._view.mark(one.replica.name, "starting")
            self._view.say(f"restarted {one.replica.name}")
        reached = _reached(snapshot, one.replica)
        if one.replica.name in self._running and reached > one.version:
            self._absent = None
            self._view.mark(one.replica.name, "")
            self._view.say(f"{one.replica.name} is back at version {reached}; it was killed at {one.version}")

    def _look(self) -> RunView:
        snapshot = self._watcher.look()
        self._view.show(snapshot)
        return snapshot

    # --- end -----------------------------------------------------------------------------------------------------

    def catch_up(self) -> RunView:
        """Waits until every replica serves the last version."""
        self._view.say("training is done; waiting for every replica to serve the last version")
        names = {one.name for one in self.replicas}

        def there() -> bool:
            snapshot = self._look()
            self._revive(snapshot)
            if _step(snapshot) < self._plan.steps:  # the snapshot may be older than the last commit
                return False
            newest = snapshot.versions[-1].version
            reached = {one.name for one in snapshot.replicas if one.reached >= newest}
            # A heartbeat may be from before the kill.
            return reached >= names and all(self._serves(one) for one in self.replicas)

        # A replica may have been restarted just now.
        self._processes.wait(there, "catching up to the last version", self._patience + _CATCH_UP)
        return self._look()


# --- the bucket --------------------------------------------------------------------------------------------------


class _RunWatcher:
    """Reads the run at intervals. If the bucket fails, it returns the last snapshot."""

    def __init__(self, url: str, background: LoopThread) -> None:
        self._bucket = open_bucket(url)
        self._reader = RunReader(self._bucket, Runtime())
        self._background = background
        self._interval = _REQUESTS * self._bucket.poll_interval
        self._looked = float("-inf")
        self._seen = RunView(self._bucket.url, time.time())

    def look(self) -> RunView:
        if time.monotonic() - self._looked >= self._interval:
            with suppress(BucketError, TimeoutError):
                self._seen = self._background.call(self._reader.look(), timeout=60)
            self._looked = time.monotonic()
        return self._seen

    def close(self) -> None:
        self._background.call(self._bucket.close(), timeout=10)


@contextmanager
def _watching(url: str) -> Iterator[_RunWatcher]:
    background = LoopThread("demo")
    try:
        watcher = _RunWatcher(url, background)
        yield watcher
        watcher.close()
    finally:
        background.stop(timeout=5)


def _step(snapshot: RunView) -> int:
    return max((one.step or 0 for one in snapshot.versions), default=0)


def _reached(snapshot: RunView, replica: ReplicaProgram) -> int:
    return max((one.reached for one in snapshot.replicas if one.name == replica.name), default=0)
