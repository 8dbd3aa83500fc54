"""TRL's asynchronous GRPO with `weightwire serve` in place of vLLM."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import Running, versions_in
from support.stores import free_ports
from support.trl_on_cpu import grpo
from weightwire import digest


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as reply:
        return json.loads(reply.read())


def check_client(server: str) -> None:
    """TRL's client of a vLLM server finds everything that it calls, but cannot push weights."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    client = VLLMClient(server, server_timeout=60)
    client.wait_for_server_ready()
    assert (client.get_max_model_len(), client.get_dtype(), client.get_world_size()) == (512, "torch.bfloat16", 1)
    assert client.get_server_info()["lora_config"] is None
    client.pause(timeout=60)
    assert get(f"{server}/is_paused")["is_paused"] is True
    client.resume(timeout=60)
    assert get(f"{server}/is_paused")["is_paused"] is False
    with pytest.raises(Exception, match=r"501.*takes its weights from the run that it follows"):
        client.init_weight_transfer_engine({})


@pytest.mark.slow
@pytest.mark.usefixtures("trl_on_cpu")
def test_async_grpo_trains_with_weightwire_serve(tiny: Path, tmp_path: Path) -> None:
    """The trainer is the same as with vLLM. The server ends with the trained bits, and no follower runs beside it."""
    [port] = free_ports(1)
    server, bucket = f"http://127.0.0.1:{port}", tmp_path / "bucket"
    options: list[str | Path | int] = ["--port", port, "--threads", 1, "--max-behind", 0]
    with Running("serve", tiny, "--follow", bucket, *options) as serving:
        trainer = grpo(tiny, server, str(bucket), tmp_path, steps=4)
        trainer.train()
        assert trainer.model_version == 5  # before the first step, and after each
        until = time.monotonic() + 120
        while trainer.weight_transfer.staleness:
            assert time.monotonic() < until
            time.sleep(0.01)
        check_client(server)
        served = get(f"{server}/weights")
        assert get(f"{server}/readyz")["ready"] is True
        metrics = urllib.request.urlopen(f"{server}/metrics", timeout=60).read().decode()
        serving.wait_for("version 5 (step 4): ")
    trained = {name: value.detach().to(torch.bfloat16) for name, value in trainer.model.named_parameters()}
    assert served["state"] == digest(trained).hex == versions_in(bucket)[-1]["after"]
    assert served["state"] != digest(tiny).hex
    assert 'weightwire_requests_total{status="200"}' in metrics
    assert not re.search(r'status="4(?!99)', metrics)  # TRL may drop its last requests
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 4
