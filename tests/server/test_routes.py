"""The server's routes, while new versions arrive."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.commands import versions_in
from support.completion_server import CompletionClient, completion_server, nothing
from support.followers import until
from weightwire import Publisher
from weightwire.delta.state import digest
from weightwire.engines.vllm import served_version
from weightwire.engines.vllm.sample_versions import spans_of
from weightwire.server.model_loader import Model
from weightwire.server.sequence import Task


class TestCompletions:
    def test_several_prompts_are_answered_in_order(self, client: CompletionClient) -> None:
        both = client.complete(prompt=["abc", "a longer one"], n=2, max_tokens=4, temperature=0)
        assert [one["index"] for one in both] == [0, 1, 2, 3]
        assert both[0]["token_ids"] == both[1]["token_ids"]
        [alone] = client.complete(prompt="a longer one", max_tokens=4, temperature=0)
        tokens = client.service.model.encode("a longer one")
        [by_tokens] = client.complete(prompt=tokens, max_tokens=4, temperature=0)
        assert alone["token_ids"] == by_tokens["token_ids"]
        assert len(alone["logprobs"]["token_logprobs"]) == len(alone["logprobs"]["tokens"]) == len(alone["token_ids"])

    def test_max_tokens_defaults_to_16_and_is_limited_by_positions(self, client: CompletionClient) -> None:
        [one] = client.complete(prompt="a", temperature=0)
        assert len(one["token_ids"]) == 16 or one["finish_reason"] == "stop"
        [one] = client.complete(prompt=[5] * 505, max_tokens=100, seed=1)
        assert (len(one["token_ids"]), one["finish_reason"]) == (7, "length")

    def test_the_same_seed_gives_the_same_answer(self, client: CompletionClient) -> None:
        def ask(seed: int | None) -> list[Any]:
            return [one["token_ids"] for one in client.complete(prompt="seed", n=3, max_tokens=6, seed=seed)]

        assert ask(7) == ask(7)
        assert ask(7) != ask(8)
        assert ask(None) != ask(None)
        assert len({tuple(one) for one in ask(7)}) == 3

    def test_a_completion_ends_at_a_stop_text(self, client: CompletionClient) -> None:
        asked = {"prompt": "stop", "max_tokens": 40, "seed": 3}
        [whole] = client.complete(**asked)
        stop = next(letter for letter in whole["text"][1:] if letter.isascii())
        [cut] = client.complete(**asked, stop=[stop])
        assert (cut["finish_reason"], cut["text"]) == ("stop", whole["text"].partition(stop)[0])

    def test_many_clients_are_served_at_once(self, client: CompletionClient) -> None:
        texts = [f"{number} bottles of beer on the wall"[: 3 + number % 20] for number in range(40)]
        alone = {text: client.complete(prompt=text, max_tokens=2, seed=5)[0] for text in texts[:5]}
        answers: dict[str, Any] = {}

        def ask(text: str) -> None:
            answers[text] = client.complete(prompt=text, max_tokens=2, seed=5)[0]

        threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers.keys() == set(texts)
        for text, one in alone.items():
            assert answers[text]["logprobs"]["token_logprobs"][0] == pytest.approx(
                one["logprobs"]["token_logprobs"][0], abs=0.1
            )


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            (b"no json", 400, "malformed"),
            ({"prompt": "a", "n": "2"}, 400, "$.n"),
            ({"prompt": ""}, 400, "the prompt is empty"),
            ({"prompt": [[]]}, 400, "the prompt is empty"),
            ({"prompt": [320]}, 400, "outside the model's vocabulary of 320"),
            ({"prompt": [-1]}, 400, "outside the model's vocabulary of 320"),
            ({"prompt": [5] * 512}, 400, "the prompt has 512 tokens, but the model has 512 positions"),
            ({"prompt": "a" * 6656}, 400, "the prompt has 6656 tokens, but the model has 512 positions"),
            ({"prompt": "a" * 6657}, 400, "the prompt has 6657 characters, but the model's 512 positions hold"),
            ({"prompt": "a" * (15 << 20)}, 400, "characters"),
            (b" " * ((16 << 20) + 1), 413, "larger than 16 MiB"),
        ],
    )
    def test_invalid_requests_are_refused(self, client: CompletionClient, body: Any, status: int, message: str) -> None:
        code, answer = client.call("/v1/completions", body)
        assert (code, answer["error"]["code"]) == (status, status)
        assert message in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"

    def test_a_large_request_does_not_block_others(
        self, client: CompletionClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only the last of many texts is empty, so all of them must be read first."""
        refused: list[Any] = []
        body = {"prompt": ["ab cd " * 80] * 4095 + [""]}
        began, answered = threading.Event(), threading.Event()
        encode = Model.encode

        def encode_slowly(*args: Any, **settings: Any) -> Any:
            began.set()
            assert answered.wait(60)
            return encode(*args, **settings)

        monkeypatch.setattr(Model, "encode", encode_slowly)
        thread = threading.Thread(target=lambda: refused.append(client.call("/v1/completions", body)))
        thread.start()
        assert began.wait(60)
        assert client.call("/health")[0] == 200
        answered.set()
        thread.join()
        assert refused[0][0] == 400

    def test_a_full_queue_is_a_503(self, client: CompletionClient) -> None:
        task = Task((5,), 500)
        future = client.service.batcher.submit([task] * 16_384)
        try:
            code, answer = client.call("/v1/completions", {"prompt": "a", "n": 4096})
        finally:
            future.cancel()
        assert (code, answer["error"]["code"], answer["error"]["type"]) == (503, 503, "server_error")
        assert "4096 sequences do not fit" in answer["error"]["message"]

    @pytest.mark.parametrize(
        "path",
        ["/health", "/readyz", "/v1/completions", "/v1/chat/completions", "/weights", "/metrics", "/wake", "/pause"],
    )
    def test_foreign_host_names_are_refused(self, client: CompletionClient, path: str) -> None:
        request = urllib.request.Request(f"{client.url}{path}", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        answer = json.loads(caught.value.read())["error"]
        assert (caught.value.code, answer["code"], answer["type"]) == (403, 403, "invalid_request_error")
        assert "accepts local requests only" in answer["message"]

    def test_unknown_routes_are_refused(self, client: CompletionClient) -> None:
        assert client.call("/v1/embeddings", {})[0] == 404
        assert client.call("/v1/completions") == (
            405,
            {
                "error": {
                    "message": "method not allowed: GET /v1/completions",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": 405,
                }
            },
        )

    def test_a_client_that_disconnects_is_dropped(self, client: CompletionClient, held: threading.Event) -> None:
        connection = http.client.HTTPConnection(client.url.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 500, "n": 40}))
        until(lambda: client.service.batcher.running)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        held.set()
        until(lambda: not client.service.batcher.running)


class TestOtherRoutes:
    def test_weights_route_works_before_the_first_version(self, client: CompletionClient, chat_model: Path) -> None:
        assert client.call("/health") == (200, {"status": "ok", "version": None})
        assert client.call("/weights") == (200, {"run": None, "version": None, "state": digest(chat_model).hex})
        assert served_version(client.url) is None
        [one] = client.complete(prompt="a", max_tokens=2)
        assert {span["version"] for span in one["weight_versions"]} == {"default"}

    def test_models_route_lists_every_name_of_the_model(self, client: CompletionClient) -> None:
        models = client.call("/v1/models")[1]["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 512), ("also tiny", 512)]

    def test_metrics_route_counts_requests_and_tokens(self, client: CompletionClient) -> None:
        client.complete(prompt="a", max_tokens=2, seed=1)
        client.call("/v1/completions", {})
        text = urllib.request.urlopen(f"{client.url}/metrics").read().decode()
        assert 'weightwire_requests_total{status="200"}' in text
        assert 'weightwire_requests_total{status="400"}' in text
        assert "weightwire_tokens_total" in text
        assert "weightwire_served -1.0" in text
        assert "weightwire_ready 0.0" in text


# --- under load --------------------------------------------------------------------------------------------------


class Trained:
    """A model of which only the last norm changes, and all of its versions.

    The KV cache does not depend on the last norm, so a token after a swap depends only on its own version.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = self.module.model.norm.weight
        self.versions: dict[int, Any] = {}

    def publish(self, publisher: Publisher) -> int:
        generator = torch.Generator().manual_seed(len(self.versions))
        self.norm.copy_(torch.randn(128, generator=generator) * 10)
        version = publisher.publish(self.module).version
        assert version is not None
        self.versions[version] = self.norm.clone()
        return version

    def logprobs(self, prompt: list[int], tokens: list[int]) -> dict[int, Any]:
        """The log-probabilities of these tokens in each version, from one forward pass."""
        answer = {}
        for version, norm in self.versions.items():
            self.norm.copy_(norm)
            logits = self.module(torch.tensor([[*prompt, *tokens]])).logits[0].float()
            each = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            answer[version] = each.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        return answer


def test_versions_are_applied_while_the_server_answers(tiny: Path, tmp_path: Path) -> None:
    """Every token has the log-probability that its version gives, and no other version does."""
    trained, answers, stop = Trained(tiny), list[tuple[list[int], Any]](), threading.Event()
    bucket = tmp_path / "bucket"
    with Publisher(bucket, files=tiny, blocking=True, on_event=nothing) as publisher:
        newest = trained.publish(publisher)
        with completion_server(tiny, bucket, tmp_path / "replica") as client:
            until(lambda: served_version(client.url) == newest)

            def ask(number: int) -> None:
                while not stop.is_set():
                    prompt = [3 + number, 50 + len(answers) % 200, 7] * (1 + number)
                    most = 10 if number % 2 else 120
                    answers.extend((prompt, one) for one in client.complete(prompt=prompt, max_tokens=most, n=2))

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            until(lambda: newest in versions_of(answers[-20:]), 180)
            while len(trained.versions) < 6 or not any(len(spans_of(one)) > 1 for _, one in [*answers]):
                assert len(trained.versions) < 30, "no request spans a new version"
                newest = trained.publish(publisher)
                client.call("/wake", b"")
                until(lambda newest=newest: newest in versions_of(answers[-20:]), 180)  # type: ignore[misc]
            stop.set()
            for thread in threads:
                thread.join()
            state = client.call("/weights")[1]
    assert (state["version"], state["state"]) == (newest, versions_in(bucket)[-1]["after"])

    assert versions_of(answers) == set(trained.versions)
    for prompt, one in [*answers[:: 1 + len(answers) // 40], *(pair for pair in answers if len(spans_of(pair[1])) > 1)]:
        expected, answer = trained.logprobs(prompt, one["token_ids"]), np.array(one["logprobs"]["token_logprobs"])
        assert spans_of(one)[-1].end == len(answer)
        for span in spans_of(one):
            part = slice(span.start, span.end)
            off = {version: float(np.abs(answer - given)[part].max()) for version, given in expected.items()}
            assert span.version is not None
            assert off.pop(span.version) < 0.4
            if span.end - span.start >= 8:  # too many to match by chance
                assert min(off.values()) > 1.0


def versions_of(answers: list[tuple[list[int], Any]]) -> set[int | None]:
    return {span.version for _, one in [*answers] for span in spans_of(one)}
