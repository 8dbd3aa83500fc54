"""`weightwire demo` with real processes and few steps. Failures must stop all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from support.stores import SeaweedFS
from weightwire.cli.demo.demo_command import _summary
from weightwire.cli.shared.run_output import DemoOutput
from weightwire.delta.state import digest
from weightwire.demo.proof import Proof
from weightwire.demo.scenario import DemoResult
from weightwire.page.run_view import RunView, VersionView

DEMO = [sys.executable, "-m", "weightwire", "demo"]

HANG = 400.0  # seconds: only to end a hanging test, because machines differ by a factor of three


def family(pid: int) -> dict[int, str]:
    """The command lines of all descendants of a process, by process id."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, open_ = {}, [pid]
    while open_:
        for child in parents.get(open_.pop(), ()):
            open_.append(child)
            with suppress(OSError):  # it has ended
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Demo:
    """A running demo."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.pid = popen.pid

    def wait_for_all(self) -> dict[int, str]:
        """Waits until all four processes run their programs. Returns their command lines by process id."""
        end = time.monotonic() + 240

        def all_run(commands: Sequence[str]) -> bool:
            # A forked child has the command line of the demo until it executes another program.
            return len(commands) >= 4 and all(
                any(one in text for text in commands) for one in ("environment.py", "train.py")
            )

        while not all_run([*(children := family(self.pid)).values()]):
            assert self.popen.poll() is None, self.popen.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        return children

    def end(self, children: dict[int, str]) -> tuple[int, str, str]:
        """Waits for the end and checks that no child is left. Returns exit code, stdout and stderr."""
        out, err = self.popen.communicate(timeout=HANG)
        assert not [command for pid, command in children.items() if lives(pid)]
        assert "Traceback" not in out + err
        return self.popen.returncode, out, err


@contextmanager
def running(*args: str | Path) -> Iterator[Demo]:
    command = [*DEMO, *map(str, args)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Demo(popen)
    finally:
        popen.kill()
        popen.communicate()


def test_summary_has_the_proof_and_the_next_commands() -> None:
    versions = [VersionView(0, "fence", 1, None, 1.8e9, 0, 0, {}), VersionView(1, "anchor", 1, 0, 1.8e9, 1000, 0, {})]
    versions += [VersionView(number, "delta", 1, number, 1.8e9, 100, 5, {}) for number in (2, 3)]
    snapshot = RunView("url", 1.8e9, "run", nbytes=2000, parameters=1000, versions=tuple(versions))
    result = DemoResult(snapshot, Proof("0123456789abcdef", ("trainer", "replica-1", "replica-2")), 1.0)
    sent, full, proof, page, live, publish = _summary(result, "s3://bucket/run", Path("page.html"))
    assert sent == "sent       1.2 kB to each replica for 3 versions"
    assert full == "full sync  6.0 kB, 5x more"
    assert proof == "bit-exact  trainer, replica-1 and replica-2 hold the same bits: version 3, state 0123456789ab"
    assert page == "page       page.html"
    assert live.endswith("weightwire page s3://bucket/run")
    assert publish.endswith("weightwire publish DIR URL")


@pytest.mark.slow
def test_demo_ends_with_equal_bits(tmp_path: Path) -> None:
    with running("--steps", "3", "--json", "--into", tmp_path) as demo:
        children = demo.wait_for_all()
        code, out, err = demo.end(children)
    assert code == 0, err
    figures = json.loads(out)
    msgspec.convert(figures, DemoOutput)
    [root] = tmp_path.iterdir()

    # All replicas hold the weights that the trainer saved, also the one that was killed.
    assert figures["holders"] == ["trainer", "replica-1", "replica-2"]
    assert figures["state"] == digest(root / "trained").hex
    assert {digest(root / name / "current").hex for name in ("replica-1", "replica-2")} == {figures["state"]}
    assert re.search(r"killed replica-2 at version \d", err)
    assert "restarted replica-2\n" in err
    assert re.search(r"replica-2 is back at version \d", err)
    # Few weights changed in each step, and they travelled as deltas.
    assert 0 < figures["changed_fraction"] < 0.2
    versions = [json.loads(path.read_text()) for path in sorted((root / "bucket" / "commits").iterdir())]
    # A version that still waits when the next one is published is replaced by it.
    steps = [one["step"] for one in versions[2:]]
    assert [one["kind"] for one in versions] == ["fence", "anchor", *["delta"] * len(steps)]
    assert steps == sorted({*steps})
    assert steps[-1] == 3
    assert err.count("reward") == len(steps)
    assert all(one["metrics"].keys() >= {"reward", "solved", "staleness", "loss"} for one in versions[2:])
    assert figures["version"] == len(versions) - 1
    assert figures["bytes"] == sum(file["size"] for one in versions for file in one["files"])
    assert figures["full_bytes"] > 2 * figures["bytes"]
    assert all(0 < pause < 60 for pause in figures["pause_seconds"].values())

    page = Path(figures["page"]).read_text()
    assert versions[-1]["run"] in page
    assert "replica-2" in page


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_demo_and_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    with running("--into", tmp_path) as demo:
        children = demo.wait_for_all()
        demo.popen.send_signal(number)
        code, out, err = demo.end(children)
    assert (code, out) == (128 + number, "")
    word = "interrupted" if number == signal.SIGINT else "stopped"
    assert re.search(rf"{word}: logs and replicas are in {tmp_path}/\S+\n$", err)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["environment", "train"])
def test_killed_child_ends_the_demo_with_an_error(tmp_path: Path, victim: str) -> None:
    with running("--into", tmp_path) as demo:
        children = demo.wait_for_all()
        # The lowest id: a forked child has the same command line until it executes another program.
        pid = min(pid for pid, command in children.items() if f"{victim}.py" in command)
        os.kill(pid, signal.SIGKILL)
        code, out, err = demo.end(children)
    assert (code, out) == (1, "")
    name = {"environment": "environment", "train": "trainer"}[victim]
    assert re.search(
        rf"error: the {name} was killed by signal 9 \[WW-PROCESS-FAILED\]\nhint: see \S+/logs/{name}\.log\n$", err
    )


@pytest.mark.slow
def test_trainer_that_stops_early_is_an_error(tmp_path: Path) -> None:
    with running("--into", tmp_path) as demo:
        children = demo.wait_for_all()
        pid = min(pid for pid, command in children.items() if "train.py" in command)
        while not any(tmp_path.glob("*/bucket/commits/*1.json")):
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        code, out, err = demo.end(children)
    assert (code, out) == (1, "")
    assert "error: the trainer ended with code 1: stopped before the last step [WW-PROCESS-FAILED]\n" in err


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch, which the demo checks first")
class TestBadInput:
    def refused(self, *args: str | Path, env: dict[str, str] | None = None) -> str:
        command = [*DEMO, *map(str, args)]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=HANG)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "Traceback" not in ran.stderr
        return ran.stderr

    def test_file_in_place_of_the_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        error = self.refused("--into", tmp_path / "file")
        assert "file" in error
        assert "Not a directory" in error

    def test_bucket_without_write_permission_is_refused(self, tmp_path: Path, seaweedfs: SeaweedFS) -> None:
        error = self.refused("--bucket", seaweedfs.url("demo"), "--into", tmp_path, env=seaweedfs.env_of("reader"))
        assert error.startswith("error: s3://weights/demo/")
        assert "\nhint: " in error
        assert not any(tmp_path.rglob("*.log"))

    def test_unsupported_url_is_refused(self, tmp_path: Path) -> None:
        assert "\nhint: use s3://" in self.refused("--bucket", "ftp://x/y", "--into", tmp_path)

    @pytest.mark.parametrize(
        ("engine", "reason"),
        [("tensorrt", "unknown engine 'tensorrt'"), ("sglang", "the demo cannot start engine 'sglang'")],
    )
    def test_engine_that_it_cannot_start_is_refused(self, engine: str, reason: str) -> None:
        ran = subprocess.run([*DEMO, "--engine", engine], capture_output=True, text=True)
        assert ran.returncode == 2
        assert f"{reason}; choose torch or vllm" in " ".join(ran.stderr.split())
