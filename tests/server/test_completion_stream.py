"""Streamed answers: the same as whole ones, in parts, and dropped with their client."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.completion_server import CompletionClient, completion_server, nothing
from support.followers import until
from weightwire import Publisher
from weightwire.engines.vllm import served_version
from weightwire.engines.vllm.sample_versions import spans_of

LONG = {"prompt": "a", "max_tokens": 500, "logprobs": 0, "stream": True}


def opened(client: CompletionClient, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream of which nothing has been read but the head."""
    connection = http.client.HTTPConnection(client.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(LONG | fields))
    return connection, connection.getresponse()


def next_event(reply: http.client.HTTPResponse) -> Any:
    line = reply.readline()
    assert reply.readline() == b"\n"
    return json.loads(line.removeprefix(b"data: "))


def hang_up(connection: http.client.HTTPConnection, reply: http.client.HTTPResponse) -> None:
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)
    reply.close()
    connection.close()


class TestParts:
    @pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["ab", "xyz"], "n": 2}, {"stop": ["e", "\u0125"]}])
    def test_parts_add_up_to_the_whole_answer(self, client: CompletionClient, fields: Any) -> None:
        asked = {"prompt": "stream", "max_tokens": 30, "seed": 5, "logprobs": 1, "return_token_ids": True, **fields}
        whole = client.call("/v1/completions", asked)[1]["choices"]
        parts = [choice for chunk in client.stream(**asked) for choice in chunk["choices"]]
        for choice in whole:
            own = [part for part in parts if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
            logprobs = [value for part in own for value in part["logprobs"]["token_logprobs"]]
            assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=0.1)
            *before, last = own
            assert last["finish_reason"] == choice["finish_reason"]
            assert last["weight_versions"] == choice["weight_versions"]
            assert not any(part["finish_reason"] or "weight_versions" in part for part in before)

    def test_tokens_arrive_while_others_are_generated(self, client: CompletionClient, held: threading.Event) -> None:
        connection, reply = opened(client, seed=1)
        first = next_event(reply)["choices"][0]
        assert (client.service.batcher.running, first["finish_reason"]) == (1, None)
        hang_up(connection, reply)

    def test_usage_is_sent_on_request(self, client: CompletionClient) -> None:
        *chunks, last = client.stream(prompt="abc", max_tokens=4, seed=1, stream_options={"include_usage": True})
        assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 3)
        assert last["usage"]["completion_tokens"] <= 4
        assert not any("usage" in chunk for chunk in chunks)

    def test_streams_are_counted(self, client: CompletionClient) -> None:
        def tokens() -> float:
            connection = http.client.HTTPConnection(client.url.removeprefix("http://"))
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            return float(text.split("\nweightwire_tokens_total ")[1].split()[0])

        before = tokens()
        client.stream(prompt="a", max_tokens=1)
        until(lambda: tokens() == before + 1)


class TestFailures:
    def test_an_invalid_request_is_refused_before_the_stream(self, client: CompletionClient) -> None:
        assert client.refused(stream=True, prompt=[9999]).startswith("the prompt has a token outside")

    def test_a_client_that_disconnects_frees_its_places(self, client: CompletionClient, held: threading.Event) -> None:
        connection, reply = opened(client, n=40)
        next_event(reply)
        assert client.service.batcher.running
        hang_up(connection, reply)
        held.set()
        until(lambda: not client.service.batcher.running and not client.service.batcher.waiting)

    def test_a_client_that_disconnects_in_a_pause_frees_its_places(self, client: CompletionClient) -> None:
        connection, reply = opened(client, n=4)
        next_event(reply)
        try:
            assert client.call("/pause?mode=keep", b"")[0] == 200
            hang_up(connection, reply)
            until(lambda: not client.service.batcher.running)
        finally:
            client.call("/resume", b"")

    def test_a_failure_in_the_middle_is_an_event(
        self, client: CompletionClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        generation = client.service.batcher._generation
        advance, calls = generation.advance, list[int]()

        def failing() -> None:
            calls.append(1)
            if len(calls) == 3:
                raise MemoryError("not enough")
            advance()

        monkeypatch.setattr(generation, "advance", failing)
        *parts, last = client.stream(prompt="a", max_tokens=50, seed=1)
        assert parts
        assert last["error"]["code"] == 503
        assert "MemoryError" in last["error"]["message"]


def test_a_stream_across_a_swap_names_both_versions(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).requires_grad_(False)
    bucket = tmp_path / "bucket"
    with Publisher(bucket, files=tiny, blocking=True, on_event=nothing) as publisher:
        first = publisher.publish(module).version
        with completion_server(tiny, bucket, tmp_path / "replica") as client:
            until(lambda: served_version(client.url) == first)
            until(lambda: client.call("/readyz")[0] == 200)
            generation, swapped = client.service.batcher._generation, threading.Event()
            steps, advance = itertools.count(), generation.advance
            monkeypatch.setattr(generation, "advance", lambda: (next(steps) == 3 and swapped.wait(120), advance()))
            events: list[Any] = []
            connection, reply = opened(client, max_tokens=40, seed=2)
            events.append(next_event(reply))
            module.model.norm.weight.mul_(2)
            publisher.publish(module)
            until(lambda: client.service.version == publisher.version)
            swapped.set()
            while line := reply.readline():
                if line.startswith(b"data: {"):
                    events.append(json.loads(line.removeprefix(b"data: ")))
            connection.close()
    choices = [event["choices"][0] for event in events]
    assert not any("weight_versions" in choice for choice in choices[:-1])
    spans = spans_of(choices[-1])
    assert [span.version for span in spans] == [first, publisher.version]
    assert spans[-1].end == sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"])
