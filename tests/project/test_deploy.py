"""What `deploy/` starts is started here, without Docker: a real vLLM on the CPU behind its proxy; the environment."""

from __future__ import annotations

import asyncio
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
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from support.stores import NOWHERE, answers, environment, free_ports
from support.vllm_server import tiny_model
from weightwire import Publisher
from weightwire.engines.vllm import served_version
from weightwire.engines.vllm.sample_versions import oldest_version
from weightwire.weights.source import read_weights

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
ROLLOUT = [sys.executable, str(DEPLOY / "rollout/start.py")]
IMAGES = ["rollout", "environment"]
# The options of the servers in tests/support: small, quick to start, no usage statistics.
SMALL = "--max-model-len 256 --max-num-seqs 8 --dtype bfloat16 --enforce-eager --distributed-executor-backend uni"
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


class Started:
    """A start script on a port of its own, told everything by its environment."""

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
                preexec_fn=_end_with_us,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, is_so: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(self.said()[-3000:])
            time.sleep(0.05)

    def wait_for(self, text: str) -> None:
        self.until(lambda: text in self.said())

    def end(self, number: int | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def ask(self, path: str, body: object = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def status(self, line: str) -> int:
        """What is answered to a request line as it stands; clients would tidy it up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as talk:
            talk.sendall(f"{line} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            return int(talk.makefile("rb").readline().split()[1])


@contextlib.contextmanager
def started(command: list[str], root: Path, **variables: str | Path) -> Iterator[Started]:
    one = Started(command, root, variables)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.end(signal.SIGTERM)


def _end_with_us() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def children(pid: int) -> dict[str, int]:
    """The processes that one has started, by what is in their command lines."""
    listed = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {args: int(child) for child, parent, args in rows if int(parent) == pid}


def is_gone(group: int) -> bool:
    """All of its processes; those that only nobody has asked for yet count for nothing."""
    rows = subprocess.check_output(["ps", "-e", "-o", "pgid=,stat="], text=True).splitlines()
    return not any(int(pgid) == group and not stat.startswith("Z") for pgid, stat in map(str.split, rows))


# --- rollout -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rollout_server_from_nothing_but_a_url(tmp_path: Path) -> None:
    """The model comes from the run; versions are served as they come; and when the follower dies, all of it ends."""
    model = tiny_model(tmp_path / "model")
    bucket = tmp_path / "bucket"
    with (
        Publisher(bucket, files=model) as publisher,
        started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=bucket, VLLM_OPTIONS=SMALL) as server,
    ):
        server.wait_for("waiting for a run at")  # it was started first, which is all right
        publisher.publish(model).wait()
        server.wait_for("serving on http://127.0.0.1")
        assert server.ask("/health") is None

        version = publisher.publish(_changed(model)).wait()
        server.until(lambda: served_version(server.url) == version)
        assert "loading all weights anew" not in server.said()

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
        assert "error: the follower ended by SIGKILL, and everything with it" in server.said()
        assert is_gone(vllm)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_it_ends_while_vllm_starts(dies: bool, tmp_path: Path) -> None:
    """Because it is told to; or because vLLM does, which has not served anything yet."""
    model = tiny_model(tmp_path / "model")
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket", MODEL=model, VLLM_OPTIONS=SMALL) as server:
        server.until(lambda: bool(children(server.process.pid)))
        [vllm] = children(server.process.pid).values()
        if dies:
            os.kill(vllm, signal.SIGKILL)
            assert server.end() == 1
            assert server.said().endswith("error: vLLM ended by SIGKILL, and everything with it\n")
        else:
            assert server.end(signal.SIGTERM) == 0
            assert "error" not in server.said()
        assert is_gone(vllm)


@pytest.mark.slow
def test_sigterm_ends_it_while_it_waits_for_a_run(tmp_path: Path) -> None:
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket") as server:
        server.wait_for("waiting for a run at")
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({}, "WEIGHTWIRE_URL is not set"),
        ({"WEIGHTWIRE_URL": "ftp://bucket/run"}, "ftp:// is no bucket"),
        (
            {"WEIGHTWIRE_URL": "s3://bucket/run", **environment(NOWHERE, "key", "secret")},
            "s3://bucket/run/run.json: Conn",
        ),
        ({"WEIGHTWIRE_URL": "run", "PORT": "http"}, "PORT is 'http', which is no port"),
        ({"WEIGHTWIRE_URL": "run", "VLLM_OPTIONS": "'"}, "VLLM_OPTIONS cannot be read"),
        ({"WEIGHTWIRE_URL": "run", "MODEL": "nobody/nothing"}, "MODEL is 'nobody/nothing', which cannot be had"),
    ],
)
def test_what_it_is_told_is_wrong(variables: dict[str, str], error: str, tmp_path: Path) -> None:
    with started(ROLLOUT, tmp_path, **variables) as server:
        assert server.end() == 1
        first, hint = server.said().splitlines()
        assert first.startswith(f"error: {error}")
        assert hint.startswith("hint: ")


@pytest.mark.slow
def test_a_run_without_config(tmp_path: Path) -> None:
    with Publisher(tmp_path / "bucket") as publisher:
        publisher.publish({"weight": np.ones(4, np.float32)}).wait()
    with started(ROLLOUT, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket") as server:
        assert server.end() == 1
        assert "bucket: has no config.json\nhint: publish with files=" in server.said()


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_a_port_that_is_taken(image: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ROLLOUT if image == "rollout" else ENVIRONMENT
        with started(command, tmp_path, WEIGHTWIRE_URL=tmp_path / "bucket", PORT=port) as server:
            assert server.end() != 0
            assert port in server.said()
            assert "Traceback" not in server.said()


def streamed(server: Started, prompt: dict[str, Any]) -> str:
    """The same, as it comes."""
    data = json.dumps({**prompt, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.decode().removeprefix("data: ").strip() for line in reply]
    parts = [json.loads(line) for line in lines if line and line != "[DONE]"]
    assert len(parts) > 1
    return "".join(part["choices"][0]["text"] for part in parts if part["choices"])


def _changed(model: Path) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """A step later."""
    weights = read_weights(model)
    changed = {name: (one.dtype.name, one.shape, one.bits.copy()) for name, one in weights.items()}
    for _, _, bits in changed.values():
        bits[::101] ^= 1
    return changed


# --- its proxy ---------------------------------------------------------------------------------------------------


class Behind:
    """A server behind a proxy, and `seen`: every request that it took for one, with its body if it was asked for."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.port = port  # of the proxy

    async def answer(self, request: Request) -> Response:
        self.seen.append((request.method, request.url.path))
        if request.url.path == "/v1/echo":
            self.bodies.append(await request.body())
        if request.url.path == "/v1/stream":
            return StreamingResponse(self._parts())
        return JSONResponse({})

    async def _parts(self) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(30)

    async def send(self, head: str, body: bytes = b"", until: bytes = b"\r\n\r\n") -> bytes:
        """What is answered to a request that no client would make, up to the end of its head or `until`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"{head}\r\nHost: here\r\n\r\n".encode() + body)
            async with asyncio.timeout(10):
                return await reader.readuntil(until)
        finally:
            writer.close()


def through_a_proxy(monkeypatch: pytest.MonkeyPatch, work: Callable[[Behind], Coroutine[Any, Any, None]]) -> Behind:
    monkeypatch.syspath_prepend(DEPLOY / "rollout")
    from filtering_proxy import FilteringProxy

    async def run() -> Behind:
        with socket.create_server(("127.0.0.1", 0)) as inside, socket.create_server(("127.0.0.1", 0)) as outside:
            behind = Behind(outside.getsockname()[1])
            app = Starlette(routes=[Route("/{path:path}", behind.answer, methods=["GET", "POST"])])
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
            serving = asyncio.create_task(server.serve(sockets=[inside]))
            proxy = FilteringProxy(outside, f"http://127.0.0.1:{inside.getsockname()[1]}")
            await proxy.open()
            try:
                await work(behind)
            finally:
                await proxy.close()
                server.should_exit = True
                await serving
            return behind

    return asyncio.run(run())


PACKED = zlib.compress(b" " * 100)
EMPTY = b"\x78\x01" + b"\x00\x00\x00\xff\xff" * 400 + b"\x01\x00\x00\xff\xff\x00\x00\x00\x01"  # all of it is nothing


class TestProxy:
    def test_no_request_in_the_body_of_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first has a body that gets shorter when it is unpacked. What a second one sends must not be taken for the
        rest of it, up to where a request begins that is not allowed."""

        async def attack(behind: Behind) -> None:
            packed = f"Content-Encoding: deflate\r\nContent-Length: {len(EMPTY)}"
            await behind.send(f"POST /v1/models HTTP/1.1\r\n{packed}", EMPTY)
            hidden = b"\r\n" * 2000 + b"POST /pause HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n"
            await behind.send(f"POST /v1/echo HTTP/1.1\r\nContent-Length: {len(hidden)}", hidden)
            assert behind.bodies == [hidden]

        behind = through_a_proxy(monkeypatch, attack)
        assert [path for _, path in behind.seen] == ["/v1/models", "/v1/echo"]

    @pytest.mark.parametrize("length", [f"Content-Length: {len(PACKED)}", "Transfer-Encoding: chunked"])
    def test_a_body_passes_as_it_came(self, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PACKED), PACKED)
            head = f"POST /v1/echo HTTP/1.1\r\nContent-Encoding: deflate\r\n{length}"
            assert b" 200 " in await behind.send(head, chunked if "chunked" in length else PACKED)

        assert through_a_proxy(monkeypatch, ask).bodies == [PACKED]

    def test_only_a_post_has_a_body(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            assert b" 200 " in await behind.send("GET /v1/echo HTTP/1.1\r\nContent-Length: 5", b"hello")

        assert through_a_proxy(monkeypatch, ask).bodies == [b""]

    def test_an_answer_passes_as_it_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ask(behind: Behind) -> None:
            assert b" 200 " in await behind.send("GET /v1/stream HTTP/1.1", until=b"first")

        through_a_proxy(monkeypatch, ask)

    def test_what_is_no_http_is_not_worth_a_traceback(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def ask(behind: Behind) -> None:
            for head in ("GET /v1/models HTTP/1.1\r\nContent-Length: x", "GET /v1/models HTTP/1.1\r\nno header"):
                assert b" 400 " in await behind.send(head)

        assert through_a_proxy(monkeypatch, ask).seen == []
        assert caplog.records == []


# --- environment -------------------------------------------------------------------------------------------------

ENVIRONMENT = ["sh", str(DEPLOY / "environment/start.sh")]


@pytest.mark.slow
def test_the_environment(tmp_path: Path) -> None:
    with started(ENVIRONMENT, tmp_path) as server:
        server.until(lambda: answers("GET", f"{server.url}/health"))
        assert server.ask("/reset", {"seed": 7})["done"] is False
        assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.said()


# --- images ------------------------------------------------------------------------------------------------------


def instructions(image: str) -> list[list[str]]:
    """Of a Dockerfile: each with its words."""
    text = (DEPLOY / image / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def sources(image: str) -> list[str]:
    return [source for name, *words in instructions(image) if name == "COPY" for source in words[:-1]]


@pytest.mark.parametrize("image", IMAGES)
class TestImage:
    def test_stands_on_a_release(self, image: str) -> None:
        [[_, base]] = [words for words in instructions(image) if words[0] == "FROM"]
        assert re.fullmatch(r"[a-z/-]+:v?\d+(\.\d+)+(-slim)?", base)

    def test_runs_as_the_user_of_spaces(self, image: str) -> None:
        order = [words[0] for words in instructions(image)]
        assert ["USER", "1000"] in instructions(image)
        assert not {"RUN", "COPY"} & set(order[order.index("USER") :])

    def test_listens_where_spaces_look(self, image: str) -> None:
        head = (DEPLOY / image / "README.md").read_text().split("---\n")[1]
        fields = dict(line.split(": ") for line in head.splitlines())
        assert (fields["sdk"], fields["app_port"]) == ("docker", "7860")
        assert ["EXPOSE", fields["app_port"]] in instructions(image)

    def test_starts_what_it_copies(self, image: str) -> None:
        [[_, *words]] = [words for words in instructions(image) if words[0] == "ENTRYPOINT"]
        script = Path(json.loads(" ".join(words))[-1]).name
        assert f"deploy/{image}/{script}" in sources(image)

    def test_a_space_has_all_that_it_copies(self, image: str, tmp_path: Path) -> None:
        space = put_together(image, tmp_path)
        for source in sources(image):
            assert (space / source).exists(), source
        assert (space / "README.md").read_text().startswith("---\n")
        kept = (DEPLOY / image / "Dockerfile.dockerignore").read_text().split()
        for source in sources(image):
            assert any(f"!{parent}" in kept for parent in (source, *map(str, Path(source).parents))), source


@pytest.mark.slow
def test_what_is_copied_can_be_installed(tmp_path: Path) -> None:
    """All but the compiler's part."""
    space, copied = put_together("rollout", tmp_path), tmp_path / "copied"
    copied.mkdir()
    for source in sources("rollout"):
        if not source.startswith("deploy/"):
            _copy(space / source, copied)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    subprocess.run(command, cwd=copied, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "built/weightwire/engines/vllm/plugin.py").exists()


def put_together(image: str, root: Path) -> Path:
    """A Space, as its README says."""
    [block] = re.findall(r"^```sh\n(.*?)^```$", (DEPLOY / image / "README.md").read_text(), re.M | re.S)
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


def test_the_environment_has_the_releases_that_are_tested() -> None:
    [words] = [words for words in instructions("environment") if words[0] == "RUN"]
    pinned = (ROOT / "requirements-demo.txt").read_text().split()
    assert {word for word in words if "==" in word} <= set(pinned)
