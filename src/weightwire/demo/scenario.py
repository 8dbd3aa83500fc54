"""What happens in the demo: everybody is started, one replica is killed half way and comes back, all bits are compared.

Sees the run as everybody else does: through its bucket. What a person sees of it is up to the view.
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

_REQUESTS = 2.5  # how many more requests than a follower one look at the run makes, about
_START = 120.0  # seconds that a server of ours may take
_START_ENGINE = 600.0  # and any other
_CATCH_UP = 60.0
_ROOM = 256 << 20  # bytes, of which a bucket in a directory takes most
_AWAY = 4.0  # seconds that a killed replica stays away


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs, and where: `root` is a new directory of this demo."""

    run: str  # its URL
    root: Path
    steps: int
    seed: int
    engine: str
    replicas: int


@dataclass(frozen=True)
class DemoResult:
    """What came of it."""

    picture: RunView
    proof: Proof
    seconds: float


class DemoView(Protocol):
    """Who tells a person."""

    def say(self, text: str) -> None:
        """Something happened."""

    def mark(self, replica: str, state: str) -> None:
        """What is special about a replica from now on; nothing, if it is empty."""

    def show(self, picture: RunView) -> None:
        """What the run looks like now."""


def run_demo(plan: DemoOptions, view: DemoView) -> DemoResult:
    """From the first process to the last comparison. Whatever goes wrong, no process is left behind."""
    began = time.monotonic()
    example = programs.find_example()
    asyncio.run(_try_bucket(plan.run))
    logs = _make_room(plan.root)
    with _watching(plan.run) as watcher, _page(plan.run) as page, Processes(logs) as processes:
        view.say(f"watch it at {page.address}")
        demo = _DemoRun(plan, example, processes, watcher, view)
        demo.start_all()
        demo.train()
        picture = demo.catch_up()
        proof = prove(demo.replicas, plan.root / "trained")
    return DemoResult(picture, proof, time.monotonic() - began)


def _make_room(root: Path) -> Path:
    """The directory of this demo, on a disk with room for it; returns that of its logs."""
    logs = root / "logs"
    try:
        logs.mkdir(parents=True)
        free = shutil.disk_usage(logs).free
    except OSError as problem:
        raise OutputError(
            f"{logs}: cannot be made ({problem.strerror})", hint="choose another place: --into"
        ) from problem
    if free < _ROOM:
        raise OutputError(
            f"{root}: only {free >> 20} MiB are free there, and the demo takes up to {_ROOM >> 20}",
            hint="make room, or choose another place: --into",
        )
    return logs


def _page(run: str) -> PageServer:
    try:
        return PageServer(run)
    except WeightwireError:  # every port that it would try is taken
        return PageServer(run, port=0)


async def _try_bucket(url: str) -> None:
    """What is wrong with it is better said before anything is started."""
    bucket = open_bucket(url)
    try:
        await probe_bucket(bucket, Runtime().token())
    finally:
        await bucket.close()


@dataclass(frozen=True)
class _Absent:
    """A replica that was killed, when, and where it stood then."""

    replica: ReplicaProgram
    since: float
    version: int


class _DemoRun:
    """The processes of one demo, and how far it is."""

    def __init__(
        self, plan: DemoOptions, example: Path, processes: Processes, watcher: _RunWatcher, view: DemoView
    ) -> None:
        self._plan, self._example, self._processes, self._watcher, self._view = plan, example, processes, watcher, view
        self._running: dict[str, list[Process]] = {}  # by replica
        self._absent: _Absent | None = None
        self.replicas: list[ReplicaProgram] = []

    # --- the beginning -------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """All at once: who needs another one waits for it."""
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
        self._view.say(f"started environment, {names} and trainer, which share nothing but {plan.run}")
        slow = "half a minute" if plan.engine == OWN_SERVER else "some minutes"
        self._view.say(f"loading models: up to {slow}")
        for replica in self.replicas:
            self._wait_for(replica)
            self._view.say(f"{replica.name} serves at {replica.url}")

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
        """Seconds that a server may take to start."""
        return _START if self._plan.engine == OWN_SERVER else _START_ENGINE

    # --- the middle ----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Until the trainer has ended; half way, the last replica dies and comes back."""
        victim = self.replicas[-1] if len(self.replicas) > 1 else None
        while not self._trainer.ended:
            self._processes.check()
            picture = self._look()
            if victim is not None and _step(picture) >= self._plan.steps // 2:
                self._kill(victim)
                victim = None
            self._revive(picture)
            time.sleep(0.1)
        self._processes.check()

    def _kill(self, replica: ReplicaProgram) -> None:
        for process in self._running.pop(replica.name):
            self._processes.forget(process)
            process.kill()
        self._absent = _Absent(replica, time.monotonic(), _reached(self._look(), replica))
        self._view.mark(replica.name, "killed")
        self._view.say(f"killed {replica.name} at version {self._absent.version}, to see it catch up")

    def _revive(self, picture: RunView) -> None:
        """Starts the one that was killed, some seconds later, and tells when it has caught up."""
        one = self._absent
        if one is None:
            return
        if one.replica.name not in self._running and time.monotonic() - one.since > _AWAY:
            self._start_replica(one.replica)
            self._view.mark(one.replica.name, "starting")
            self._view.say(f"started {one.replica.name} again")
        reached = _reached(picture, one.replica)
        if one.replica.name in self._running and reached > one.version:
            self._absent = None
            self._view.mark(one.replica.name, "")
            missed = reached - one.version
            self._view.say(f"{one.replica.name} is back: version {reached}, {missed} further than when it was killed")

    def _look(self) -> RunView:
        picture = self._watcher.look()
        self._view.show(picture)
        return picture

    # --- the end -------------------------------------------------------------------------------------------------

    def catch_up(self) -> RunView:
        """Until every replica serves what the trainer published last."""
        names = {one.name for one in self.replicas}

        def there() -> bool:
            picture = self._look()
            self._revive(picture)
            if _step(picture) < self._plan.steps:  # a look may be older than the last commit
                return False
            newest = picture.versions[-1].version
            reached = {one.name for one in picture.replicas if one.reached >= newest}
            # What a heartbeat says may be from before it was killed.
            return reached >= names and all(self._serves(one) for one in self.replicas)

        # One may just have been started again.
        self._processes.wait(there, "catching up with the last version", self._patience + _CATCH_UP)
        return self._look()


# --- the bucket --------------------------------------------------------------------------------------------------


class _RunWatcher:
    """Looks at the run now and then; what cannot be seen just now has not changed."""

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
    background = LoopThread("weightwire-demo")
    try:
        watcher = _RunWatcher(url, background)
        yield watcher
        watcher.close()
    finally:
        background.stop(timeout=5)


def _step(picture: RunView) -> int:
    return max((one.step or 0 for one in picture.versions), default=0)


def _reached(picture: RunView, replica: ReplicaProgram) -> int:
    return max((one.reached for one in picture.replicas if one.name == replica.name), default=0)
