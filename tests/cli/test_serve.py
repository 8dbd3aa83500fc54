"""`weightwire serve`: output, refusals, and a server from before the run starts to Ctrl-C."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from support.adapters import peft_model, train_step
from support.commands import Ran, Running, save_checkpoint, versions_in, weightwire
from support.stores import free_ports
from weightwire.bucket.directory import DirectoryBucket
from weightwire.chain import read_run
from weightwire.cli import serve as serve_command
from weightwire.cli.serve import RunKind, check_kind, dtype_of_run
from weightwire.cli.shared.bucket_command import with_bucket
from weightwire.delta import digest
from weightwire.errors import EngineError, MissingDependency, PermissionDenied
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher
from weightwire.server.http_listener import HttpListener
from weightwire.telemetry.events import Event

ROUNDING = 0.03  # of log probabilities in bfloat16


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=60) as reply:
        return json.loads(reply.read())


def nothing(event: Event) -> None:
    pass


class TestRefusals:
    def test_port_in_use_is_an_error(self, tiny: Path, tmp_path: Path) -> None:
        with HttpListener(None, "127.0.0.1", 0) as other:
            port = other.url.rpartition(":")[2]
            ran = weightwire("serve", tiny, "--follow", tmp_path / "bucket", "--port", port)
        ran.check_failed(f"127.0.0.1:{port}: the port is in use by another program", "--port")

    def test_model_that_cannot_be_loaded_is_an_error(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", tmp_path):
            ran = weightwire("serve", path, "--follow", tmp_path / "bucket", "--port", 0)
            last_lines = "".join(ran.err.splitlines(keepends=True)[-2:])
            Ran(ran.code, ran.out, last_lines).check_failed(str(path))

    def test_bucket_without_read_permission_is_an_error(
        self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def denied(*_: object) -> NoReturn:
            raise PermissionDenied("it is locked", hint="ask for the key")

        monkeypatch.setattr(DirectoryBucket, "get", denied)
        monkeypatch.setattr(DirectoryBucket, "list", denied)
        weightwire("serve", tiny, "--follow", tmp_path, "--port", 0).check_failed("it is locked", "ask for the key")

    def test_invalid_url_is_an_error(self, tiny: Path) -> None:
        weightwire("serve", tiny, "--follow", "gopher://x/y", "--port", 0).check_failed("gopher")

    def test_invalid_limits_of_readiness_are_errors(self, tiny: Path, tmp_path: Path) -> None:
        for option, value in (("--max-behind", "-1"), ("--max-lag", "soon")):
            ran = weightwire("serve", tiny, "--follow", tmp_path, option, value)
            assert (ran.code, option in ran.err) == (2, True)

    def test_invalid_name_is_an_error(self, tiny: Path, tmp_path: Path) -> None:
        ran = weightwire("serve", tiny, "--follow", tmp_path, "--name", "../x")
        assert (ran.code, "Invalid value for --name" in ran.err) == (2, True)


class TestDtype:
    """MODEL is loaded in the dtype of the run."""

    @pytest.mark.parametrize(
        ("weights", "dtype"),
        [
            ({"a": ("F32", (8,), bytes(32))}, "float32"),
            ({"a": ("BF16", (8,), bytes(16)), "router": ("F32", (5,), bytes(20))}, "bfloat16"),
            ({"a": ("F16", (2,), bytes(4)), "table": ("I64", (9,), bytes(72))}, "float16"),
            ({"table": ("I64", (1,), bytes(8))}, "bfloat16"),
        ],
    )
    def test_most_float_weights_decide(self, tmp_path: Path, weights: Any, dtype: str) -> None:
        with Publisher(tmp_path, on_event=nothing) as publisher:
            publisher.publish(weights)
        assert dtype_of_run(with_bucket(str(tmp_path), read_run)) == dtype
        check_kind(str(tmp_path), RunKind(dtype))
        with pytest.raises(EngineError, match=f"the weights of the run are {dtype}, but MODEL was loaded in float64"):
            check_kind(str(tmp_path), RunKind("float64"))

    @pytest.mark.slow
    def test_float32_run_is_served(self, tiny: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
        with Publisher(tmp_path / "run", dtype=None, files=tiny, on_event=nothing) as publisher:
            publisher.publish(module)
        [port] = free_ports(1)
        with Running("serve", tiny, "--follow", tmp_path / "run", "--port", port, "--threads", 1) as server:
            server.wait_for("serving version 1 on")
            assert call(f"http://127.0.0.1:{port}/weights")["state"] == digest(module.state_dict()).hex


class TestAdapter:
    """A run may be an adapter. MODEL is then its base."""

    def test_adapter_that_appears_later_needs_a_restart(self, tiny: Path, tmp_path: Path) -> None:
        with Publisher(tmp_path, on_event=nothing) as publisher:
            publisher.publish(peft_model(tiny))
        with pytest.raises(EngineError, match="the run is an adapter that MODEL was not loaded for"):
            check_kind(str(tmp_path), RunKind())

    def test_adapter_without_its_config_is_an_error(self, tmp_path: Path) -> None:
        path = save_checkpoint(tmp_path / "adapter", {"base_model.model.a.lora_A.weight": np.ones(3, np.float32)})
        with Publisher(tmp_path / "run", on_event=nothing) as publisher:
            publisher.publish(path)
        with pytest.raises(EngineError, match="the run is an adapter without adapter_config"):
            check_kind(str(tmp_path / "run"), RunKind())

    def test_adapter_without_peft_is_an_error(
        self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Publisher(tmp_path, on_event=nothing) as publisher:
            publisher.publish(peft_model(tiny))
        monkeypatch.setattr(serve_command, "find_spec", lambda name: None)
        with pytest.raises(MissingDependency, match="the run is an adapter, and peft is not installed"):
            check_kind(str(tmp_path), RunKind())

    @pytest.mark.slow
    def test_adapter_is_served_and_updated(self, tiny: Path, tmp_path: Path) -> None:
        import peft
        import torch
        from transformers import AutoModelForCausalLM

        trained, bucket, [port] = peft_model(tiny), tmp_path / "run", free_ports(1)
        url, prompt = f"http://127.0.0.1:{port}", [5, 9, 40, 7]
        ask = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "logprobs": 1}

        def fresh_logprobs(tokens: list[int]) -> Any:
            """Of the tokens after the prompt, by a fresh load of the newest version: shape [tokens, vocabulary]."""
            base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
            with Follower(bucket, into=tmp_path / "fresh", on_event=nothing) as follower:
                follower.once()
                model = peft.PeftModel.from_pretrained(base, follower.checkpoint())
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            return torch.log_softmax(logits.float(), -1).numpy()

        with Publisher(bucket, blocking=True, on_event=nothing) as publisher:
            train_step(trained, 0)
            publisher.publish(trained)
            into = tmp_path / "replica"
            with Running("serve", tiny, "--follow", bucket, "--port", port, "--into", into, "--threads", 1) as server:
                server.wait_for(f"serving version 1 on {url}")
                for step in (1, 2):
                    train_step(trained, step)
                    publisher.publish(trained)
                    publisher.wait(replicas=1, timeout=60)
                    served, newest = call(f"{url}/weights"), versions_in(bucket)[-1]
                    assert (served["version"], served["state"]) == (step + 1, newest["after"])
                    [choice] = call(f"{url}/v1/completions", ask)["choices"]
                    fresh = fresh_logprobs(choice["token_ids"])
                    expected = fresh[np.arange(12), choice["token_ids"]]
                    # Batches of another shape round differently: up to 0.004 here, so compare values and not tokens.
                    assert np.abs(choice["logprobs"]["token_logprobs"] - expected).max() < ROUNDING
                    assert (fresh.max(1) - expected).max() < ROUNDING  # greedy


def publish(publisher: Publisher, module: Any) -> int:
    """Publishes the next version, in which a few weights differ."""
    module.model.norm.weight.data.mul_(1.5)
    version = publisher.publish(module).version
    assert version is not None
    return version


@pytest.mark.slow
def test_server_waits_for_the_run_follows_it_and_survives_a_kill(tiny: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    bucket, [port] = tmp_path / "bucket", free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command: list[str | Path | int] = ["serve", tiny, "--follow", bucket, "--port", port]
    command += ["--into", tmp_path / "replica", "--name", "one"]
    command += [
        "--served-model-name",
        "policy",
        "--served-model-name",
        "other",
        "--max-behind",
        0,
        "--max-lag",
        "30s",
    ]
    question = {"prompt": "hello", "max_tokens": 4, "model": "other"}

    def serves(version: int) -> None:
        served = call(f"{url}/weights")
        assert (served["version"], served["state"]) == (version, versions_in(bucket)[version]["after"])
        assert call(f"{url}/readyz")["ready"] is True
        [choice] = call(f"{url}/v1/completions", question)["choices"]
        assert {span["version"] for span in choice["weight_versions"]} == {str(version)}

    with Running(*command, "--threads", 1) as server:
        server.wait_for(f"serving {tiny} on {url}")
        server.wait_for("waiting for a run at")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            call(f"{url}/readyz")
        assert call(f"{url}/healthz") == {"status": "alive"}
        assert [model["id"] for model in call(f"{url}/v1/models")["data"]] == ["policy", "other"]
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
            publisher.wait(replicas=1, timeout=60)
            beat = json.loads((bucket / "replicas" / "one.json").read_bytes())
            assert {"fetch", "apply", "stage", "swap"} <= beat["stages"].keys()

            server.process.kill()
            third = publish(publisher, module)

    with Running(*command) as server:
        server.wait_for(f"serving version {third} on {url}")
        serves(third)
        ends: list[float] = []

        def request_many_tokens() -> None:
            with suppress(OSError, http.client.HTTPException):
                call(f"{url}/v1/completions", {"prompt": "hello", "max_tokens": 500, "n": 200})
            ends.append(time.monotonic())

        client = threading.Thread(target=request_many_tokens)
        client.start()
        time.sleep(0.5)
        began = time.monotonic()
        ran = server.stop(signal.SIGINT)
        client.join()
        assert (ran.code, ran.out) == (130, "")
        assert ran.err.splitlines()[-1] == f"interrupted: version {third} was served last"
        assert "Traceback" not in ran.err
        assert ends[0] - began < 30
