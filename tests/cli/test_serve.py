"""`weightwire serve`, as a user runs it: what it says, how it ends, and that it comes back."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.commands import Running, versions_in, weightwire
from support.stores import free_ports
from weightwire.bucket.directory import DirectoryBucket
from weightwire.errors import PermissionDenied
from weightwire.publisher.publisher import Publisher
from weightwire.server.http_listener import HttpListener
from weightwire.telemetry.events import Event


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=60) as reply:
        return json.loads(reply.read())


def nothing(event: Event) -> None:
    pass


class TestRefuses:
    def test_a_port_in_use(self, tiny: Path, tmp_path: Path) -> None:
        with HttpListener(None, "127.0.0.1", 0) as other:
            port = other.url.rpartition(":")[2]
            ran = weightwire("serve", tiny, "--follow", tmp_path / "bucket", "--port", port)
        ran.check_failed(f"127.0.0.1:{port}: another program listens there already", "--port")

    def test_a_model_that_is_none(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", tmp_path):
            ran = weightwire("serve", path, "--follow", tmp_path / "bucket", "--port", 0)
            ran.check_failed(str(path))

    def test_a_bucket_that_may_not_be_read(self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def get(*_: object) -> NoReturn:
            raise PermissionDenied("it is locked", hint="ask for the key")

        monkeypatch.setattr(DirectoryBucket, "get", get)
        weightwire("serve", tiny, "--follow", tmp_path, "--port", 0).check_failed("it is locked", "ask for the key")

    def test_a_url_that_is_none(self, tiny: Path) -> None:
        weightwire("serve", tiny, "--follow", "gopher://x/y", "--port", 0).check_failed("gopher")

    def test_a_name_that_is_none(self, tiny: Path, tmp_path: Path) -> None:
        ran = weightwire("serve", tiny, "--follow", tmp_path, "--name", "../x")
        assert (ran.code, "Invalid value for --name" in ran.err) == (2, True)


def publish(publisher: Publisher, module: Any) -> int:
    """The next version, which differs in a few weights."""
    module.model.norm.weight.data.mul_(1.5)
    version = publisher.publish(module).version
    assert version is not None
    return version


@pytest.mark.slow
def test_from_before_the_run_through_a_kill_to_ctrl_c(tiny: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    bucket, [port] = tmp_path / "bucket", free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command: list[str | Path | int] = ["serve", tiny, "--follow", bucket, "--port", port]
    command += ["--into", tmp_path / "replica", "--name", "one"]
    question = {"prompt": "hello", "max_tokens": 4}

    def serves(version: int) -> None:
        told = call(f"{url}/weights")
        assert (told["version"], told["state"]) == (version, versions_in(bucket)[version]["after"])
        [choice] = call(f"{url}/v1/completions", question)["choices"]
        assert {span["version"] for span in choice["weight_versions"]} == {str(version)}

    with Running(*command, "--threads", 1) as server:
        server.wait_for(f"serving {tiny} on {url}")
        server.wait_for("waiting for a run at")
        [choice] = call(f"{url}/v1/completions", question)["choices"]
        assert {span["version"] for span in choice["weight_versions"]} == {"default"}
        with Publisher(bucket, files=tiny, blocking=True, on_event=nothing, notify=[f"{url}/wake"]) as publisher:
            first = publish(publisher, module)
            server.wait_for(f"version {first}: ")
            serves(first)
            second = publish(publisher, module)
            line = server.wait_for(f"version {second}: ")
            assert "behind the commit, torch paused for " in line
            serves(second)
            publisher.wait(replicas=1, timeout=20)
            beat = json.loads((bucket / "replicas" / "one.json").read_bytes())
            assert {"fetch", "apply", "stage", "swap"} <= beat["stages"].keys()

            server.process.kill()
            third = publish(publisher, module)

    with Running(*command) as server:
        server.wait_for(f"serving version {third} on {url}")
        serves(third)
        ends: list[float] = []

        def ask_for_much() -> None:
            with suppress(OSError, urllib.error.URLError):
                call(f"{url}/v1/completions", {"prompt": "hello", "max_tokens": 500, "n": 200})
            ends.append(time.monotonic())

        client = threading.Thread(target=ask_for_much)
        client.start()
        time.sleep(0.5)
        began = time.monotonic()
        ran = server.stop(signal.SIGINT)
        client.join()
        assert (ran.code, ran.out) == (0, "")
        assert ran.err.splitlines()[-1] == f"stopped at version {third}"
        assert "Traceback" not in ran.err
        assert ends[0] - began < 10
