"""Processes that are started, looked after and ended together, each with a log of its own.

Knows nothing of what they do. None outlives the one that started them: they are ended with whatever they started
themselves, and the kernel sees to it where that one is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightwire.errors import OutputError, ProcessFailed
from weightwire.system import Closeable

__all__ = ["Process", "Processes", "answers", "free_port"]

_GRACE = 8.0  # seconds to end by itself
_LOOK = 0.05
_TAIL = 20_000  # bytes of a log in which last words are looked for


class Process:
    """One of them. What it prints goes to `log`."""

    def __init__(self, name: str, log: Path, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.log = log
        self.must_last = True
        self._popen = popen

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def check(self) -> None:
        """Raises ProcessFailed if it has ended in a way that it should not have."""
        code = self._popen.poll()
        if code is None or (code == 0 and not self.must_last):
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        error, hint, last = _last_words(self.log)
        said = error or (last if code > 0 else "")  # who is killed has no time to say why
        raise ProcessFailed(f"the {self.name} {how}" + (f": {said}" if said else ""), hint=hint or f"see {self.log}")

    def kill(self) -> None:
        """As a power cut would."""
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def ask_to_end(self) -> None:
        if not self.ended:
            self._signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Waits for it, and for what it started; not beyond the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def _signal(self, number: int) -> None:
        # Each leads a group of its own, which may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


class Processes(Closeable):
    """All of them: `with Processes(logs) as processes`, which ends those that are left."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Process] = []

    def start(self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Process:
        log = self._logs / f"{name.replace(' ', '-')}.log"
        try:
            with log.open("ab") as out, _signals_wait():
                popen = subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                    start_new_session=True,  # so that Ctrl-C comes to us alone, who end them in order
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
                process = Process(name, log, popen)
                self._running.append(process)
        except OSError as problem:
            raise OutputError(
                f"the {name} cannot be started ({problem})", hint="see whether the disk is full"
            ) from problem
        return process

    def forget(self, process: Process) -> None:
        """It has ended, and that is as it should be."""
        self._running.remove(process)

    def check(self) -> None:
        """Raises ProcessFailed if one has ended that should not have."""
        for process in self._running:
            process.check()

    def wait(self, ready: Callable[[], bool], what: str, seconds: float) -> None:
        """Until something is so; raises ProcessFailed as `check` does, or if it takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{what} took longer than {seconds:.0f} s", hint=f"see the logs in {self._logs}")
            time.sleep(_LOOK)

    def wait_to_answer(self, process: Process, url: str, seconds: float) -> None:
        self.wait(lambda: answers(url), f"the start of the {process.name}", seconds)

    def close(self) -> None:
        """Ends all of them, at the same time."""
        deadline = time.monotonic() + _GRACE
        for process in reversed(self._running):
            process.ask_to_end()
        for process in reversed(self._running):
            process.end(deadline)
        self._running.clear()

    def kill(self) -> None:
        """Ends all at once, where nothing is to be saved."""
        for process in self._running:
            process.kill()
        self._running.clear()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that end this process do so afterwards: a child that runs before we know of it would be lost."""
    if threading.current_thread() is not threading.main_thread():  # which alone may be interrupted by them
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for late in came:
            os.kill(os.getpid(), late)


def free_port() -> int:
    """One that nobody uses just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answers(url: str) -> bool:
    """Whether a server is there, and well."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _last_words(log: Path) -> tuple[str, str, str]:
    """The error and the hint that a process ended with, and the last line that it wrote."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "", "", ""
    last = lines[-1] if lines else ""
    errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not errors:
        return "", "", last
    after = [*lines, ""][errors[-1] + 1]
    return (
        lines[errors[-1]].removeprefix("error: "),
        after.removeprefix("hint: ") if after.startswith("hint: ") else "",
        last,
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
