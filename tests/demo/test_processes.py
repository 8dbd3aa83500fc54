"""Groups of real processes that start and stop together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.stores import NOWHERE
from weightwire.demo.processes import Processes
from weightwire.errors import ProcessFailed

SLEEPS = [sys.executable, "-c", "import time; print('up'); time.sleep(600)"]
# Ignores SIGTERM and has a child.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as processes:
        yield processes


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(reached: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_output_goes_to_the_logs(processes: Processes, tmp_path: Path) -> None:
    one = processes.start("follower of replica-1", SLEEPS)
    until(lambda: one.log.read_text() == "up\n")
    assert one.log == tmp_path / "follower-of-replica-1.log"
    processes.check()


def test_all_processes_stop_at_the_end_of_the_block(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        pids = [processes.start(f"process {number}", SLEEPS).pid for number in range(3)]
        assert all(map(lives, pids))
    assert not any(map(lives, pids))


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.demo.processes._GRACE", 0.2)
    with Processes(tmp_path) as processes:
        one = processes.start("stubborn", [sys.executable, "-c", STUBBORN])
        until(lambda: one.log.read_text().endswith("\n"))
        child = int(one.log.read_text())
        assert lives(one.pid)
        assert lives(child)
    until(lambda: not lives(one.pid) and not lives(child))


def test_a_killed_process_is_named_in_the_error(processes: Processes) -> None:
    one = processes.start("trainer", SLEEPS)
    os.kill(one.pid, signal.SIGKILL)
    until(lambda: one.ended)
    with pytest.raises(ProcessFailed, match=r"^the trainer was killed by signal 9\n") as caught:
        processes.check()
    assert caught.value.hint == f"see {one.log}"


def test_the_last_error_in_a_log_is_reported(processes: Processes) -> None:
    script = "print('working'); print('error: s3://x: no such bucket'); print('hint: make one'); exit(1)"
    one = processes.start("trainer", [sys.executable, "-c", script])
    until(lambda: one.ended)
    with pytest.raises(ProcessFailed) as caught:
        processes.check()
    assert caught.value.message == "the trainer ended with code 1: s3://x: no such bucket"
    assert caught.value.hint == "make one"


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_may_end_must_end_with_code_0(processes: Processes, code: int) -> None:
    one = processes.start("trainer", [sys.executable, "-c", f"exit({code})"])
    one.must_last = False
    until(lambda: one.ended)
    if code == 0:
        processes.check()
        return
    with pytest.raises(ProcessFailed, match="the trainer ended with code 3"):
        processes.check()


def test_waiting_for_an_ended_process_is_an_error(processes: Processes) -> None:
    one = processes.start("server", [sys.executable, "-c", "raise SystemExit('no room')"])
    with pytest.raises(ProcessFailed, match="the server ended with code 1: no room"):
        processes.wait_to_answer(one, f"{NOWHERE}/health", 60)


def test_waiting_times_out(processes: Processes) -> None:
    one = processes.start("server", SLEEPS)
    with pytest.raises(ProcessFailed, match="the start of the server took longer than 0 s"):
        processes.wait_to_answer(one, f"{NOWHERE}/health", 0.2)


def test_a_signal_during_a_start_does_not_lose_the_process(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started = popen(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)  # the child runs but is not tracked yet
        return started

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.start("one", SLEEPS)
    [one] = processes._running
    assert lives(one.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux stops children with their parent")
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from weightwire.demo.processes import Processes
with Processes(Path({str(tmp_path)!r})) as processes:
    print(processes.start("one", {SLEEPS!r}).pid, flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert lives(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not lives(child))
