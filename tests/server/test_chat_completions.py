"""Chat completions: the tokenizer's template, and requests that it does not accept."""

from __future__ import annotations

from typing import Any

import pytest

from support.completion_server import CompletionClient

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|>"}]
TEXT = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>\n"
REPLY = "<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}


def chat(client: CompletionClient, **fields: Any) -> Any:
    status, answer = client.call("/v1/chat/completions", {"messages": HELLO, **GREEDY, **fields})
    assert status == 200, answer
    return answer


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, TEXT + REPLY),
        ({"add_generation_prompt": False}, TEXT),
        ({"chat_template_kwargs": {"hint": "Hm"}}, TEXT + REPLY + "Hm"),
    ],
)
def test_a_chat_is_the_completion_of_its_template(client: CompletionClient, fields: Any, text: str) -> None:
    answer = chat(client, **fields)
    [plain] = client.complete(prompt=text, **GREEDY)
    [choice] = answer["choices"]
    assert choice["token_ids"] == plain["token_ids"]
    assert choice["message"] == {"role": "assistant", "content": plain["text"]}
    assert answer["usage"]["prompt_tokens"] == len(client.service.model.encode(text))


def test_a_streamed_chat_equals_a_whole_one(client: CompletionClient) -> None:
    asked = {"messages": HELLO, "n": 2, "seed": 4, "max_tokens": 12}
    whole = chat(client, **(asked | {"temperature": 1}))["choices"]
    parts = [chunk["choices"][0] for chunk in client.stream("/v1/chat/completions", **asked)]
    for choice in whole:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["delta"]["content"] for part in own) == choice["message"]["content"]
        assert [part["delta"].get("role") for part in own] == ["assistant", *[None] * (len(own) - 1)]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["weight_versions"] == choice["weight_versions"]


def test_a_chat_may_fill_all_positions(client: CompletionClient) -> None:
    fields = {"max_tokens": None, "temperature": 1, "seed": 3, "stop": None}
    answer = chat(client, **fields)
    used = answer["usage"]["total_tokens"]
    assert used == 512 or answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] > 16 or used < 512


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": HELLO[::-1]}, "the chat template does not accept the messages: system must come first"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs must not contain 'tokenize'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs must not contain 'chat_template'"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "but the model has 512 positions"),
        ({"messages": [{"role": "user", "content": "a" * 10_000}]}, "the model's 512 positions hold at most"),
    ],
)
def test_a_chat_that_does_not_fit_is_refused(client: CompletionClient, fields: Any, message: str) -> None:
    status, answer = client.call("/v1/chat/completions", {"messages": HELLO, **fields})
    assert status == 400
    assert message in answer["error"]["message"]


def test_a_model_without_a_template_refuses_chats(client: CompletionClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.service.model.tokenizer, "chat_template", None)
    status, answer = client.call("/v1/chat/completions", {"messages": HELLO})
    assert (status, answer["error"]["message"]) == (
        400,
        "the served model has no chat template: use /v1/completions",
    )
