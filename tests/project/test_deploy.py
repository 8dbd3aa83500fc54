"""Runs the start scripts of `deploy/` without Docker: a real vLLM on the CPU behind its proxy, and the environment."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.captures import eventually
from support.doc_pages import blocks
from support.stores import NOWHERE, answers, environment, free_ports
from support.vllm_server import tiny_model
from weightwire import Publisher
from weightwire.engines.vllm import served_version
from weightwire.engines.vllm.sample_versions import oldest_version
from weightwire.weights.source import read_weights

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
IMAGES = ["rollout", "environment"]


def start_command(block: str) -> list[str]:
    """The command of a README block, without the variables: each test sets its own."""
    words = [word for word in shlex.split(block) if not re.match(r"[A-Z_]+=", word)]
    return [sys.executable if word == "python" else word for word in words]


[ROLLOUT] = map(start_command, blocks("deploy/rollout/README.md", "Without Docker"))
[ENVIRONMENT] = map(start_command, blocks("deploy/environment/README.md", "Without Docker"))
# As in tests/support: small, quick to start, no usage statistics.
SMALL = "--max-model-len 256 --max-num-seqs 8 --dtype bfloat16 --enforce-eager --distributed-executor-backend uni"
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


class Started:
    """A running start script on a free port, configured by environment variables."""

    def __init__(self, command: list[str], root: Path, variables: Mapping[str, str | Path]) -> None:
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = root / "log"
        given = {name: str(value) for name, value in variables.items()}
        kept = {name: value for name, value in os.environ.items() if name not in ("MODEL", "WEIGHTWIRE_URL")}
        here = {
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "WEIGHTWIRE_DIR": str(root / "state"),
            "PYTHON": sys.executable,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**kept, **QUIET, **here, **given},
                cwd=ROOT,
                stdout=log,
                stderr=log,
                preexec_fn=_stop_with_parent,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, is_so: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.output()[-3000:])
            time.sleep(0.05)

    def wait_for(self, text: str) -> None:
        self.until(lambda: text in self.output())

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def status(self, line: str) -> int:
        """The status for a raw request line, which HTTP clients would normalize."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(
                f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            return int(connection.makefile("rb").readline().split()[1])


@contextlib.contextmanager
def started(command: list[str], root: Path, **variables: str | Path) -> Iterator[Started]:
    one = Started(command, root, variables)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.end(signal.SIGTERM)


def _stop_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def children(pid: int) -> dict[str, int]:
    """The children of a process: process ids by command line."""
    listed = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {args: int(child) for child, parent, args in rows if int(parent) == pid}


def is_gone(group: int) -> bool:
    """Whether a process group has ended. Zombies do not count."""
    rows = subprocess.check_output(["ps", "-e", "-o", "pgid=,stat="], text=True).splitlines()
    return not any(int(pgid) == group and not stat.startswith("Z") for pgid, stat in map(str.split, rows))


# --- rollout -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rollout_server_needs_only_a_url(tmp_path: Path) -> None:
    """It takes the model from the run, serves new versions, and stops when the follower dies."""
    model = tiny_model(tmp_path / "model")
    bucket = tmp_path / "bucket"
    with (
        Publisher(bucket, files=model) as publisher,
        started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=bucket, VLLM_OPTIONS=SMALL) as server,
    ):
        server.wait_for("waiting for a run at")  # the server may start before the publisher
        publisher.publish(model).wait()
        server.wait_for("serving on http://127.0.0.1")
        assert server.ask("/health") is None

        version = publisher.publish(_changed(model)).wait()
        server.until(lambda: served_version(server.url) == version)
        assert "reloading all weights" not in server.output()

        prompt = {"model": "model", "prompt": "the bucket is the wire", "max_tokens": 4, "temperature": 0}
        text = server.ask("/v1/completions", prompt)["choices"][0]["text"]
        assert streamed(server, prompt) == text
        sampling = {"max_tokens": 4, "temperature": 0}
        answer = server.ask("/inference/v1/generate", {"token_ids": [9, 9], "sampling_params": sampling})
        assert oldest_version(answer["choices"][0]) == version

        for line in (
            "POST /pause",
            "POST /update_weights",
            "POST /collective_rpc",
            "POST /inference/v1/abort_requests",
            "POST /weight_info",
            "GET /server_info",
            "GET /metrics",
            "POST /v1/../pause",
            "POST /v1/%2e%2e/pause",
            "POST /v1//pause",
            "POST //pause",
            f"POST {server.url}/pause",
        ):
            assert server.status(line) == 404, line
        assert server.status("GET /v1/models?limit=1") == 200

        [follower] = [pid for args, pid in children(server.process.pid).items() if "weightwire follow" in args]
        [vllm] = [pid for args, pid in children(server.process.pid).items() if "vllm." in args]
        os.kill(follower, signal.SIGKILL)
        assert server.end() == 1
        assert "error: the follower was killed by SIGKILL; stopping the server" in server.output()
        assert eventually(lambda: is_gone(vllm))


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_rollout_server_stops_while_vllm_starts(dies: bool, tmp_path: Path) -> None:
    """Either by SIGTERM, or because vLLM dies before it serves."""
    model = tiny_model(tmp_path / "model")
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket", MODEL=model, VLLM_OPTIONS=SMALL) as server:
        server.until(lambda: bool(children(server.process.pid)))
        [vllm] = children(server.process.pid).values()
        if dies:
            os.kill(vllm, signal.SIGKILL)
            assert server.end() == 1
            assert server.output().endswith("error: vLLM was killed by SIGKILL; stopping the server\n")
        else:
            assert server.end(signal.SIGTERM) == 0
            assert "error" not in server.output()
        assert eventually(lambda: is_gone(vllm))


@pytest.mark.slow
def test_sigterm_stops_the_rollout_server_while_it_waits_for_a_run(tmp_path: Path) -> None:
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket") as server:
        server.wait_for("waiting for a run at")
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({}, "WEIGHTWIRE_URL is not set"),
        ({"WEIGHTWIRE_URL": "ftp://bucket/run"}, "ftp:// is not a supported kind of bucket"),
        (
            {"WEIGHTWIRE_URL": "s3://bucket/run", **environment(NOWHERE, "key", "secret")},
            "s3://bucket/run/run.json: Conn",
        ),
        ({"WEIGHTWIRE_URL": "run", "PORT": "http"}, "PORT is 'http', which is not a port"),
        ({"WEIGHTWIRE_URL": "run", "VLLM_OPTIONS": "'"}, "cannot parse VLLM_OPTIONS"),
        ({"WEIGHTWIRE_URL": "run", "WEIGHTWIRE_MAX_BEHIND": "-1"}, "WEIGHTWIRE_MAX_BEHIND is '-1', which is not"),
        ({"WEIGHTWIRE_URL": "run", "WEIGHTWIRE_MAX_LAG": "long"}, "WEIGHTWIRE_MAX_LAG: 'long' is not a duration"),
        ({"WEIGHTWIRE_URL": "run", "MODEL": "nobody/nothing"}, "cannot download MODEL 'nobody/nothing'"),
    ],
)
def test_wrong_settings_are_errors_with_a_hint(variables: dict[str, str], error: str, tmp_path: Path) -> None:
    with started(ROLLOUT, tmp_path, **variables) as server:
        assert server.end() == 1
        first, hint = server.output().splitlines()
        assert first.startswith(f"error: {error}")
        assert hint.startswith("hint: ")


@pytest.mark.slow
def test_a_run_without_config_is_an_error(tmp_path: Path) -> None:
    with Publisher(tmp_path / "bucket") as publisher:
        publisher.publish({"weight": np.ones(4, np.float32)}).wait()
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket") as server:
        assert server.end() == 1
        assert "bucket: the run has no config.json\nhint: publish with files=" in server.output()


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_a_port_in_use_is_an_error(image: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ROLLOUT if image == "rollout" else ENVIRONMENT
        with started(command, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket", PORT=port) as server:
            assert server.end() != 0
            assert port in server.output()
            assert "Traceback" not in server.output()


def streamed(server: Started, prompt: dict[str, Any]) -> str:
    """The text of the same completion, streamed."""
    data = json.dumps({**prompt, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.decode().removeprefix("data: ").strip() for line in reply]
    parts = [json.loads(line) for line in lines if line and line != "[DONE]"]
    assert len(parts) > 1
    return "".join(part["choices"][0]["text"] for part in parts if part["choices"])


def _changed(model: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """The weights one step later."""
    weights = read_weights(model)
    changed = {name: (one.dtype.name, one.shape, one.bits.copy()) for name, one in weights.items()}
    for _, _, bits in changed.values():
        bits[::101] ^= 1
    return changed


def test_a_rollout_server_on_all_addresses_needs_a_token(tmp_path: Path) -> None:
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "run", HOST="0.0.0.0", VLLM_API_KEY="") as server:
        assert server.end() == 1
        assert "0.0.0.0: cannot listen beyond this machine without a token" in server.output()
        assert "hint: set VLLM_API_KEY or WEIGHTWIRE_TOKEN" in server.output()


# --- environment -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_environment_serves_and_stops(tmp_path: Path) -> None:
    with started(ENVIRONMENT, tmp_path) as server:
        server.until(lambda: answers("GET", f"{server.url}/health"))
        assert server.ask("/reset", {"seed": 7})["done"] is False
        assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.output()


# --- images ------------------------------------------------------------------------------------------------------


def instructions(image: str) -> list[list[str]]:
    """The instructions of a Dockerfile, split into words."""
    text = (DEPLOY / image / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def sources(image: str) -> list[str]:
    return [source for name, *words in instructions(image) if name == "COPY" for source in words[:-1]]


@pytest.mark.parametrize("image", IMAGES)
class TestImage:
    def test_base_image_is_a_release(self, image: str) -> None:
        [[_, base]] = [words for words in instructions(image) if words[0] == "FROM"]
        assert re.fullmatch(r"[a-z/-]+:v?\d+(\.\d+)+(-slim)?", base)

    def test_image_runs_as_the_user_of_spaces(self, image: str) -> None:
        order = [words[0] for words in instructions(image)]
        assert ["USER", "1000"] in instructions(image)
        assert not {"RUN", "COPY"} & set(order[order.index("USER") :])

    def test_image_listens_on_the_port_of_spaces(self, image: str) -> None:
        head = (DEPLOY / image / "README.md").read_text().split("---\n")[1]
        fields = dict(line.split(": ") for line in head.splitlines())
        assert (fields["sdk"], fields["app_port"]) == ("docker", "7860")
        assert ["EXPOSE", fields["app_port"]] in instructions(image)

    def test_the_entry_point_is_copied(self, image: str) -> None:
        [[_, *words]] = [words for words in instructions(image) if words[0] == "ENTRYPOINT"]
        script = Path(json.loads(" ".join(words))[-1]).name
        assert f"deploy/{image}/{script}" in sources(image)

    def test_a_space_has_all_files_that_the_image_copies(self, image: str, tmp_path: Path) -> None:
        space = build_space(image, tmp_path)
        for source in sources(image):
            assert (space / source).exists(), source
        assert (space / "README.md").read_text().startswith("---\n")
        kept = (DEPLOY / image / "Dockerfile.dockerignore").read_text().split()
        for source in sources(image):
            assert any(f"!{parent}" in kept for parent in (source, *map(str, Path(source).parents))), source


@pytest.mark.slow
def test_the_copied_files_can_be_installed(tmp_path: Path) -> None:
    """Without compiling the kernel."""
    space, copied = build_space("rollout", tmp_path), tmp_path / "copied"
    copied.mkdir()
    for source in sources("rollout"):
        if not source.startswith("deploy/"):
            _copy(space / source, copied)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run(command, cwd=copied, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "built/weightwire/engines/vllm/plugin.py").exists()


def build_space(image: str, root: Path) -> Path:
    """Builds a Space with the commands in its README."""
    block, _ = blocks(f"deploy/{image}/README.md", "A Space")
    for line in block.splitlines():
        command, *words = shlex.split(line)
        if command == "mkdir":
            (root / words[0]).mkdir()
            continue
        assert command == "cp"
        for word in words[:-1]:
            if word != "-r":
                _copy(ROOT / word, root / words[-1])
    return root / "space"


def _copy(source: Path, into: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, into / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        shutil.copy(source, into)


def test_the_environment_uses_the_tested_releases() -> None:
    [words] = [words for words in instructions("environment") if words[0] == "RUN"]
    pinned = (ROOT / "requirements-demo.txt").read_text().split()
    assert {word for word in words if "==" in word} <= set(pinned)
