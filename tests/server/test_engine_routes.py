"""The routes of vLLM that trainers call."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.completion_server import CompletionClient
from weightwire.engines.vllm.rollout_server import VllmRolloutServer
from weightwire.errors import EngineError


def test_the_server_describes_itself_as_vllm_does(client: CompletionClient) -> None:
    """tests/trainers/test_trl_serve.py asks with TRL's own client."""
    config = client.call("/server_info?config_format=json")[1]["vllm_config"]
    assert (config["model_config"]["dtype"], config["lora_config"]) == ("torch.bfloat16", None)
    assert client.call("/get_world_size") == (200, {"world_size": 1})
    assert client.call("/version")[1]["server"] == "weightwire serve"
    assert client.call("/weight_info") == (200, {"weight_version": "default"})


def test_requests_wait_for_the_end_of_a_pause(client: CompletionClient) -> None:
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.extend(client.complete(prompt="a", max_tokens=2)))
    assert client.call("/pause?mode=keep", b"") == (200, {"status": "paused"})
    try:
        assert client.call("/is_paused") == (200, {"is_paused": True})
        asking.start()
        asking.join(0.2)
        assert not answers
    finally:
        assert client.call("/resume", b"") == (200, {"status": "resumed"})
    asking.join(60)
    assert len(answers) == 1
    assert client.call("/is_paused") == (200, {"is_paused": False})


@pytest.mark.parametrize("path", ["/pause", "/pause?mode=wait", "/pause?mode=abort"])
def test_a_pause_that_ends_requests_is_refused(client: CompletionClient, path: str) -> None:
    status, answer = client.call(path, b"")
    assert (status, "use /pause?mode=keep" in answer["error"]["message"]) == (400, True)
    assert client.call("/is_paused") == (200, {"is_paused": False})


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights", "/v1/load_lora_adapter"])
def test_weights_cannot_be_pushed(client: CompletionClient, path: str) -> None:
    status, answer = client.call(path, {})
    assert (status, answer["error"]["type"]) == (501, "server_error")
    assert f"{path} is not supported: this server takes its weights from the run" in answer["error"]["message"]


def test_a_trainers_transfer_accepts_the_server(client: CompletionClient) -> None:
    server = VllmRolloutServer(client.url)
    assert server.check().startswith("weightwire serve ")
    assert server.served_version() is None
    with pytest.raises(EngineError, match="takes its weights from the run that it follows"):
        server.forget_version()
