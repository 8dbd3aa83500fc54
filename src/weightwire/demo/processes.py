"""A group of processes that start and stop together. Each one has a log file.

No process outlives its parent: stopping a process also stops its children, and the kernel stops all of them if the
parent is killed. Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
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
from weightwire.system import TOKEN_VARIABLE, Closeable

__all__ = ["Process", "Processes", "answers", "free_port"]

_GRACE = 8.0  # seconds from SIGTERM to SIGKILL
_LOOK = 0.05
_TAIL = 20_000  # bytes at the end of a log to search for an error


class Process:
    """A running process. Its output goes to `log`."""

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
        """Raises ProcessFailed if the process has failed, or has ended although it must last."""
        code = self._popen.poll()
        if code is None or (code == 0 and not self.must_last):
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        error, hint, last = _log_tail(self.log)
        reason = error or (last if code > 0 else "")  # a killed process logs no reason
        raise ProcessFailed(
            f"the {self.name} {how}" + (f": {reason}" if reason else ""), hint=hint or f"see {self.log}"
        )

    def kill(self) -> None:
        """Without a chance to clean up, like a power cut."""
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def ask_to_end(self) -> None:
        if not self.ended:
            self._signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Waits until the deadline, then kills the process and its children."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def _signal(self, number: int) -> None:
        # The process leads its own group, which may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


class Processes(Closeable):
    """Use it as `with Processes(logs) as processes`: the end of the block stops all processes."""

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
                    # The programs ask each other without a token, on this machine.
                    env={**os.environ, "PYTHONUNBUFFERED": "1", TOKEN_VARIABLE: "", **(env or {})},
                    start_new_session=True,  # Ctrl-C reaches only this process, which stops the others in order
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
                process = Process(name, log, popen)
                self._running.append(process)
        except OSError as problem:
            raise OutputError(f"cannot start the {name} ({problem})", hint="check the free disk space") from problem
        return process

    def forget(self, process: Process) -> None:
        """Stops tracking a process that may end."""
        self._running.remove(process)

    def check(self) -> None:
        """Raises ProcessFailed if any process has failed."""
        for process in self._running:
            process.check()

    def wait(self, ready: Callable[[], bool], what: str, seconds: float) -> None:
        """Waits until `ready()`. Raises ProcessFailed as `check` does, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{what} took longer than {seconds:.0f} s", hint=f"see the logs in {self._logs}")
            time.sleep(_LOOK)

    def wait_to_answer(self, process: Process, url: str, seconds: float) -> None:
        self.wait(lambda: answers(url), f"the start of the {process.name}", seconds)

    def close(self) -> None:
        """Stops all processes at the same time."""
        deadline = time.monotonic() + _GRACE
        for process in reversed(self._running):
            process.ask_to_end()
        for process in reversed(self._running):
            process.end(deadline)
        self._running.clear()

    def kill(self) -> None:
        """Kills all processes at once."""
        for process in self._running:
            process.kill()
        self._running.clear()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delays signals that end this process. Otherwise a child could start and never be tracked."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers run in the main thread only
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for late in received:
            os.kill(os.getpid(), late)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answers(url: str) -> bool:
    """Whether the server at a URL responds with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _log_tail(log: Path) -> tuple[str, str, str]:
    """The last error in a log, its hint, and the last line."""
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
        re.sub(r" \[WW-[A-Z-]+\]$", "", lines[errors[-1]].removeprefix("error: ")),
        after.removeprefix("hint: ") if after.startswith("hint: ") else "",
        last,
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
