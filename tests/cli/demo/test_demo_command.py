"""`weightwire demo`: all of its processes for real, few steps; and what goes wrong ends cleanly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.stores import SeaweedFS
from weightwire.delta.state import digest

DEMO = [sys.executable, "-m", "weightwire", "demo"]

HANG = 400.0  # seconds: only against waiting for ever, machines differ by a factor of three


def family(pid: int) -> dict[int, str]:
    """A process's children, theirs and so on, by their command lines."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended just now
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, open_ = {}, [pid]
    while open_:
        for child in parents.get(open_.pop(), ()):
            open_.append(child)
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Demo:
    """One that runs, and the processes that it has started."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.pid = popen.pid

    def wait_for_all(self) -> dict[int, str]:
        """Until environment, both replicas and trainer are there."""
        end = time.monotonic() + 60
        while len(children := family(self.pid)) < 4:
            assert self.popen.poll() is None, self.popen.communicate()
            assert time.monotonic() < end
            time.sleep(0.1)
        return children

    def end(self, children: dict[int, str]) -> tuple[int, str, str]:
        """Its code and what it said; none of its children is left."""
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


@pytest.mark.slow
def test_from_the_first_process_to_the_last_comparison(tmp_path: Path) -> None:
    with running("--steps", "6", "--json", "--into", tmp_path) as demo:
        children = demo.wait_for_all()
        code, out, err = demo.end(children)
    assert code == 0, err
    figures = json.loads(out)
    [root] = tmp_path.iterdir()

    # All hold what the trainer wrote of its own weights in the end, one of them after it was killed.
    assert figures["holders"] == ["trainer", "replica-1", "replica-2"]
    assert figures["state"] == digest(root / "trained").hex
    assert {digest(root / name / "current").hex for name in ("replica-1", "replica-2")} == {figures["state"]}
    assert re.search(r"killed replica-2 at version \d", err)
    assert "started replica-2 again\n" in err
    assert re.search(r"replica-2 is back: version \d", err)
    assert err.count("reward") == 6

    # Weights have changed, few of them, and travelled as deltas.
    assert 0 < figures["changed_fraction"] < 0.2
    versions = [json.loads(path.read_text()) for path in sorted((root / "bucket" / "commits").iterdir())]
    assert [one["kind"] for one in versions] == ["fence", "anchor", *["delta"] * 6]
    assert all(one["metrics"].keys() >= {"reward", "solved", "staleness", "loss"} for one in versions[2:])
    assert figures["version"] == 7
    assert figures["sent_bytes"] == sum(file["size"] for one in versions for file in one["files"])
    assert figures["full_bytes"] > 3 * figures["sent_bytes"]
    assert all(0 < pause < 5 for pause in figures["pause_seconds"].values())

    page = Path(figures["page"]).read_text()
    assert versions[-1]["run"] in page
    assert "replica-2" in page


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_half_way(tmp_path: Path, number: signal.Signals) -> None:
    with running("--into", tmp_path) as demo:
        children = demo.wait_for_all()
        demo.popen.send_signal(number)
        code, out, err = demo.end(children)
    assert (code, out) == (128 + number, "")
    assert re.search(rf"stopped; what there is of it is in {tmp_path}/\S+\n$", err)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["environment", "train"])
def test_a_child_that_is_killed_ends_it(tmp_path: Path, victim: str) -> None:
    with running("--into", tmp_path) as demo:
        children = demo.wait_for_all()
        # The first: a child that it has just forked has its command line until it runs something else.
        pid = min(pid for pid, command in children.items() if f"{victim}.py" in command)
        os.kill(pid, signal.SIGKILL)
        code, out, err = demo.end(children)
    assert (code, out) == (1, "")
    name = {"environment": "environment", "train": "trainer"}[victim]
    assert re.search(rf"error: the {name} was killed by signal 9\nhint: see \S+/logs/{name}\.log\n$", err)


@pytest.mark.slow
def test_a_trainer_that_stops_early_is_no_success(tmp_path: Path) -> None:
    with running("--into", tmp_path) as demo:
        children = demo.wait_for_all()
        pid = min(pid for pid, command in children.items() if "train.py" in command)
        while not any(tmp_path.glob("*/bucket/commits/*1.json")):
            time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        code, out, err = demo.end(children)
    assert (code, out) == (1, "")
    assert "error: the trainer ended with code 1: stopped before the last step\n" in err


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: the demo asks for it first")
class TestBadInput:
    def refused(self, *args: str | Path, env: dict[str, str] | None = None) -> str:
        command = [*DEMO, *map(str, args)]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=HANG)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "Traceback" not in ran.stderr
        return ran.stderr

    def test_a_place_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert "file" in self.refused("--into", tmp_path / "file")
        assert "Not a directory" in self.refused("--into", tmp_path / "file")

    def test_a_bucket_without_rights(self, tmp_path: Path, seaweedfs: SeaweedFS) -> None:
        said = self.refused("--bucket", seaweedfs.url("demo"), "--into", tmp_path, env=seaweedfs.env_of("reader"))
        assert said.startswith("error: s3://weights/demo/")
        assert "\nhint: " in said
        assert not any(tmp_path.rglob("*.log"))

    def test_no_bucket(self, tmp_path: Path) -> None:
        assert "\nhint: use s3://" in self.refused("--bucket", "ftp://x/y", "--into", tmp_path)

    def test_an_engine_that_is_none(self) -> None:
        ran = subprocess.run([*DEMO, "--engine", "sglang"], capture_output=True, text=True)
        assert ran.returncode == 2
        assert "unknown engine 'sglang'; choose one of torch, vllm" in " ".join(ran.stderr.split())
